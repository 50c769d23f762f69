"""Reads and writes the tensors of checkpoint folders, one at a time, so that a large model needs little memory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.locate import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", f"*{INDEX}")


class Tensors:
    """The tensors of a folder: safetensors or PyTorch's files, in one or several. `files`: the file of each name."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError."""
        self.folder, self.files = folder, _files(folder)

    def __getitem__(self, name: str) -> Tensor:
        file = self.files[name]
        if file.suffix == ".safetensors":
            return _opened(file).get_tensor(name)
        return _unpickled(file)[name]

    def bytes(self, name: str) -> int:
        """Bytes of one tensor."""
        file = self.files[name]
        if file.suffix == ".safetensors":
            begin, end = _header(file)[name]["data_offsets"]
            return int(end) - int(begin)
        tensor = _unpickled(file)[name]
        return tensor.numel() * tensor.element_size()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        file = self.files[name]
        if file.suffix == ".safetensors":
            return tuple(int(size) for size in _header(file)[name]["shape"])
        return tuple(_unpickled(file)[name].shape)

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor, by name."""
        return {name: self.bytes(name) for name in self.files}


def _files(folder: Path) -> dict[str, Path]:
    for whole in (SAFETENSORS, PICKLE):
        index = folder / (whole + INDEX)
        if index.is_file():
            try:
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index}: not an index of weights: {error}") from None
            found = {str(name): folder / Path(str(file)).name for name, file in named.items()}
            missing = sorted({str(path) for path in found.values() if not path.is_file()})
            if missing:
                raise CheckpointError(f"{missing[0]}: not there, and {index.name} names it")
            return found
        if (folder / whole).is_file():
            names = _header(folder / whole) if whole == SAFETENSORS else _unpickled(folder / whole)
            return {name: folder / whole for name in names if name != "__metadata__"}
    raise CheckpointError(f"{folder}: has neither {SAFETENSORS} nor {PICKLE}, nor an index of them")


def dtypes(file: Path) -> dict[str, str]:
    """What safetensors calls the dtype of each tensor in a file, such as BF16. Raises CheckpointError."""
    return {name: str(entry.get("dtype")) for name, entry in _header(file).items() if name != "__metadata__"}


@functools.lru_cache(maxsize=2)
def _opened(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")


@functools.lru_cache(maxsize=256)
def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise CheckpointError(f"{file}: not a safetensors file")
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
        except ValueError:
            raise CheckpointError(f"{file}: not a safetensors file") from None
    return header


@functools.lru_cache(maxsize=2)
def _unpickled(file: Path) -> dict[str, Tensor]:
    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # no code in it is run
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read as weights: {' '.join(str(error).split())[:200]}") from None
    return {str(name): value for name, value in loaded.items()}


def shards_of(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divides names into files of at most `most` bytes, in their order; a larger tensor has a file of its own."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def write_tensors(folder: Path, shards: list[list[str]], load: Callable[[str], Tensor]) -> list[Path]:
    """Writes safetensors files, each whole and once, and the index after them."""
    from safetensors.torch import save_file

    written: list[Path] = []
    places: dict[str, str] = {}
    total = 0
    for names, file in zip(shards, _names(folder, len(shards)), strict=True):
        tensors = {name: load(name).contiguous().clone() for name in names}  # tensors of a pickle may share memory
        save_file(tensors, file, metadata={"format": "pt"})
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        places |= dict.fromkeys(names, file.name)
        written.append(file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / (SAFETENSORS + INDEX)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return written


def _names(folder: Path, count: int) -> Iterator[Path]:
    if count == 1:
        yield folder / SAFETENSORS
        return
    for number in range(1, count + 1):
        yield folder / f"model-{number:05}-of-{count:05}.safetensors"

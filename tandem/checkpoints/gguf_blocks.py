"""Reads GGUF weights as stored blocks, which native steps run."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.family_configs import table
from tandem.checkpoints.gguf_header import Header, MalformedHeader, TensorEntry
from tandem.checkpoints.locate import CheckpointError, split_files
from tandem.checkpoints.numbers import STORAGE, Stored, of_floats

_Q5_0, _Q3_K, _IQ4_NL = 6, 11, 20  # GGML's numbers
_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)
_AT_ONCE = 1 << 22  # numbers that are repacked at a time


@dataclass(frozen=True, slots=True)
class Repacked:
    """A format, its block's inputs and bytes, and the format that holds it."""

    name: str
    inputs: int
    bytes: int
    into: str


REPACKED = {
    _Q5_0: Repacked("q5_0", 32, 22, "q8_0"),
    _Q3_K: Repacked("q3_k", 256, 110, "q6_k"),
    _IQ4_NL: Repacked("iq4_nl", 32, 18, "q8_0"),
}


def repacked(rows: NDArray[np.uint8], kind: int) -> NDArray[np.uint8]:
    """Repacks rows, uint8 [outputs, row bytes]."""
    form = REPACKED[kind]
    step = max(1, _AT_ONCE // (rows.shape[1] // form.bytes * form.inputs))
    make = _q6_k if kind == _Q3_K else _q8_0
    made = [make(rows[at : at + step].reshape(-1, form.bytes), kind) for at in range(0, len(rows), step)]
    return np.concatenate(made).reshape(len(rows), -1)


def _q8_0(blocks: NDArray[np.uint8], kind: int) -> NDArray[np.uint8]:
    plain = blocks.copy()
    plain[:, :2] = _ONE
    return np.concatenate([blocks[:, :2], _integers(plain, kind).view(np.uint8)], 1)


def _q6_k(blocks: NDArray[np.uint8], kind: int) -> NDArray[np.uint8]:
    # Q3_K: high bits [32], low bits [64], scales [12], scale of scales [2].
    plain, scales = blocks.copy(), blocks.copy()
    plain[:, 96:104], plain[:, 104:108], plain[:, 108:] = 0x11, 0xAA, _ONE  # all scales are 1
    scales[:, :32], scales[:, 32:96], scales[:, 108:] = 0xFF, 0x55, _ONE  # all numbers are 1
    numbers = (_integers(plain, kind) + 32).view(np.uint8)
    low, high = (numbers & 15).reshape(-1, 2, 2, 64), (numbers >> 4).reshape(-1, 2, 4, 32)
    lows = low[:, :, 0] | low[:, :, 1] << 4
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [lows.reshape(-1, 128), highs.reshape(-1, 64), _integers(scales, kind)[:, ::16].view(np.uint8)]
    return np.concatenate([*parts, blocks[:, 108:]], 1)


def _integers(blocks: NDArray[np.uint8], kind: int) -> NDArray[np.int8]:
    import gguf

    made: NDArray[np.int8] = gguf.dequantize(blocks, gguf.GGMLQuantizationType(kind)).astype(np.int8)
    return made


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A GGML format: its number, inputs and bytes per block."""

    kind: int
    inputs: int
    bytes: int


FORMATS = {
    "q4_0": BlockFormat(2, 32, 18),
    "q4_1": BlockFormat(3, 32, 20),
    "q8_0": BlockFormat(8, 32, 34),
    "q4_k": BlockFormat(12, 256, 144),
    "q6_k": BlockFormat(14, 256, 210),
}  # that native steps read (runners/native/blocks.h)
DENSE_TYPES = {0: "F32", 1: "F16", 30: "BF16"}  # GGML's dense types by safetensors' names
_OTHERS = {7: "Q5_1", 10: "Q2_K", 13: "Q5_K", 23: "IQ4_XS", 39: "MXFP4"}
_NAMES = {**{form.kind: name for name, form in FORMATS.items()}, **{kind: form.name for kind, form in REPACKED.items()}}
"""Formats that native steps run, stored or repacked, by number."""
MATRIX_NAMES = {
    **{name: f"attn_{name}" for name in "qkv"},
    "o": "attn_output",
    **{name: f"ffn_{name}" for name in ("gate", "up", "down")},
}  # by GGUF's names
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [outputs, inputs] as bytes uint8 [outputs, row bytes]; the last block is padded."""

    format: str
    rows: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Part:
    """A mapped file; tensors start at `begin`."""

    file: Path
    content: mmap.mmap
    header: Header
    begin: int

    @classmethod
    def of(cls, file: Path) -> _Part:
        with file.open("rb") as stream:
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        header = Header(content)
        alignment = header.whole("general.alignment", _ALIGNMENT)
        return cls(file, content, header, -(-header.end // alignment) * alignment)

    def check(self, number: int, count: int) -> None:
        said = (self.header.values.get("split.no") or 0, self.header.values.get("split.count") or 1)
        if said != (number, count):
            raise MalformedHeader(
                f"split.no {said[0]} and split.count {said[1]}, and by its name it is part {number} of {count}"
            )


class StoredWeights:
    """The matrices of a GGUF file with all its parts, mapped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tensors: dict[str, TensorEntry] = {}
        self._parts: dict[str, _Part] = {}
        parts = split_files(file)
        for number, part in enumerate(parts):
            try:
                opened = _Part.of(part)
                opened.check(number, len(parts))
                if twice := self._tensors.keys() & opened.header.tensors.keys():
                    raise MalformedHeader(f"{min(twice)} is in an earlier part too")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{part}: its header cannot be read: {error}") from None
            self._tensors |= opened.header.tensors
            self._parts |= dict.fromkeys(opened.header.tensors, opened)
            if not number:
                self._header, self._content = opened.header, opened.content
        claimed = self._header.values.get("split.tensors.count", len(self._tensors))
        if len(parts) > 1 and claimed != len(self._tensors):
            raise CheckpointError(
                f"{file}: split.tensors.count is {claimed}, its parts have {len(self._tensors)} tensors"
            )

    def formats(self) -> tuple[str, ...]:
        kinds = {tensor.kind for tensor in self._tensors.values() if len(tensor.dimensions) > 1}
        return tuple(sorted(name for kind, name in _NAMES.items() if kind in kinds))

    @property
    def runs_as_stored(self) -> bool:
        kinds = {tensor.kind for tensor in self._tensors.values() if len(tensor.dimensions) > 1}
        return bool(kinds - set(DENSE_TYPES)) and kinds <= {*DENSE_TYPES, *_NAMES}

    def matrix(self, layer: int, name: str) -> Blocks | None:
        """Returns q, k, v, o, gate, up or down; None if dense. Raises CheckpointError for an unknown format."""
        return self.block(f"blk.{layer}.{MATRIX_NAMES[name]}.weight")

    def head(self) -> Blocks | None:
        """Returns the output matrix, or a tied embedding, like `matrix`."""
        return self.block("output.weight" if "output.weight" in self._tensors else "token_embd.weight")

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @property
    def header(self) -> Header:
        return self._header

    def arrays(self, *names: str) -> list[list[Any]]:
        found = Header(self._content, names).arrays
        return [found.get(name, []) for name in names]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).dimensions[::-1]

    def dense(self, name: str) -> Stored:
        """Returns numbers, blocks dequantised to float32, rows as in `matrix`. Raises CheckpointError."""
        import gguf

        tensor = self._entry(name)
        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            inputs, size = gguf.GGML_QUANT_SIZES[kind]
            rows = self._in_our_order(tensor, self._rows(tensor, BlockFormat(tensor.kind, inputs, size)))
            if dtype := DENSE_TYPES.get(tensor.kind):
                return Stored(dtype, rows.view(STORAGE[dtype]).reshape(self.shape(name)))
            return of_floats(gguf.dequantize(rows, kind).reshape(self.shape(name)))
        except (ValueError, KeyError, NotImplementedError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self._file}: {name}, of type {tensor.kind}, cannot be dequantised") from None

    def _entry(self, name: str) -> TensorEntry:
        if (tensor := self._tensors.get(name)) is None:
            raise CheckpointError(f"{self._file}: has no {name}")
        return tensor

    def numbers(self, name: str) -> list[float]:
        return [float(each) for each in self.dense(name).floats().reshape(-1)]

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def block(self, name: str) -> Blocks | None:
        """Returns blocks; None if dense. Raises CheckpointError for an unknown format."""
        tensor = self._entry(name)
        if tensor.kind in DENSE_TYPES:
            return None
        if form := REPACKED.get(tensor.kind):
            rows = self._rows(tensor, BlockFormat(tensor.kind, form.inputs, form.bytes))
            return Blocks(form.into, self._in_our_order(tensor, repacked(rows, tensor.kind)))
        found = next(((name, form) for name, form in FORMATS.items() if form.kind == tensor.kind), None)
        if found is None:
            stored = _OTHERS.get(tensor.kind, f"type {tensor.kind}")
            known = ", ".join(_NAMES.values()).upper()
            raise CheckpointError(f"{self._file}: {name} is stored as {stored}; what runs as stored is {known}")
        return Blocks(found[0], self._in_our_order(tensor, self._rows(tensor, found[1])))

    def _rows(self, tensor: TensorEntry, form: BlockFormat) -> NDArray[np.uint8]:
        inputs, outputs = tensor.dimensions[0], math.prod(tensor.dimensions[1:])
        size = inputs // form.inputs * form.bytes
        part = self._parts[tensor.name]
        begin = part.begin + tensor.offset
        if inputs % form.inputs or begin + outputs * size > len(part.content):
            raise CheckpointError(f"{part.file}: {tensor.name} does not lie in it whole")
        return np.frombuffer(part.content, np.uint8, outputs * size, begin).reshape(outputs, size)

    def _in_our_order(self, tensor: TensorEntry, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        # transformers has all first members of rotary pairs, then all second ones.
        architecture = self._header.values.get("general.architecture")
        kind = tensor.name.split(".")[-2]
        turned = any(each.turned and each.gguf == architecture for each in table()["native"].values())
        if not turned or kind not in ("attn_q", "attn_k"):
            return rows
        try:
            heads = self._header.whole(f"{architecture}.attention.head_count")
            if kind == "attn_k":
                heads = self._header.whole(f"{architecture}.attention.head_count_kv", heads)
        except MalformedHeader as error:
            raise CheckpointError(f"{self._file}: {error}") from None
        outputs = tensor.dimensions[-1]  # of a bias, whose one row has a number for each
        if outputs % (2 * heads) or rows.size % outputs:
            raise CheckpointError(f"{self._file}: {tensor.name} has {outputs} rows, not pairs of {heads} heads")
        pairs = rows.reshape(heads, outputs // heads // 2, 2, rows.size // outputs)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

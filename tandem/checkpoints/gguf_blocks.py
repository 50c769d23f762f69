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
from tandem.checkpoints.gguf_header import Header, MalformedHeader, TensorEntry, header_of
from tandem.checkpoints.locate import CheckpointError, split_files
from tandem.checkpoints.numbers import STORAGE, Floats, Stored, of_floats

_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)
_AT_ONCE = 1 << 22  # numbers that are repacked at a time


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A GGML format: its number, inputs and bytes per block, and the format that it is repacked into."""

    kind: int
    inputs: int
    bytes: int
    into: str = ""


FORMATS = {
    "q4_0": BlockFormat(2, 32, 18),
    "q4_1": BlockFormat(3, 32, 20),
    "q8_0": BlockFormat(8, 32, 34),
    "q4_k": BlockFormat(12, 256, 144),
    "q6_k": BlockFormat(14, 256, 210),
}  # that native steps read (runners/native/blocks.h)
REPACKED = {
    "q5_0": BlockFormat(6, 32, 22, "q8_0"),
    "q3_k": BlockFormat(11, 256, 110, "q6_k"),
    "iq4_nl": BlockFormat(20, 32, 18, "q8_0"),
}
DENSE_TYPES = {0: "F32", 1: "F16", 30: "BF16"}  # GGML's dense types by safetensors' names
_NAMES = {form.kind: name for name, form in (FORMATS | REPACKED).items()}
"""Formats that native steps run, stored or repacked, by number."""
MATRIX_NAMES = {
    **{name: f"attn_{name}" for name in "qkv"},
    "o": "attn_output",
    **{name: f"ffn_{name}" for name in ("gate", "up", "down")},
}  # by GGUF's names


def repacked(rows: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    """Repacks rows, uint8 [outputs, row bytes], of a format of REPACKED, exactly."""
    form = REPACKED[name]
    step = max(1, _AT_ONCE // (rows.shape[1] // form.bytes * form.inputs))
    make = _q6_k if form.into == "q6_k" else _q8_0
    made = [make(rows[at : at + step].reshape(-1, form.bytes), form.kind) for at in range(0, len(rows), step)]
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


def _q8_0_floats(rows: NDArray[np.uint8]) -> Floats:
    # gguf's products, without its two copies: an embedding may be larger than all else that a start touches
    blocks = rows.reshape(-1, 34)  # a float16 scale, 32 int8
    made = np.empty((len(blocks), 32), np.float32)
    return np.multiply(blocks[:, 2:].view(np.int8), blocks[:, :2].view("<f2").astype(np.float32), out=made)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [outputs, inputs] as bytes uint8 [outputs, row bytes]; the last block is padded."""

    format: str
    rows: NDArray[np.uint8]


class StoredWeights:
    """The matrices of a GGUF file with all its parts, mapped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tensors: dict[str, TensorEntry] = {}
        self._parts: dict[Path, tuple[Header, mmap.mmap]] = {}
        parts = split_files(file)
        for number, part in enumerate(parts):
            try:
                header = header_of(part)
                with part.open("rb") as stream:
                    content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                header.check_part(number, len(parts))
                if twice := self._tensors.keys() & header.tensors.keys():
                    raise MalformedHeader(f"{min(twice)} is in an earlier part too")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{part}: its header cannot be read: {error}") from None
            self._tensors |= header.tensors
            self._parts[part] = header, content
        self.header = self._parts[parts[0]][0]
        claimed = self.header.values.get("split.tensors.count", len(self._tensors))
        if len(parts) > 1 and claimed != len(self._tensors):
            raise CheckpointError(
                f"{file}: split.tensors.count is {claimed}, its parts have {len(self._tensors)} tensors"
            )

    def formats(self) -> tuple[str, ...]:
        return tuple(sorted(_NAMES[kind] for kind in self._kinds() if kind in _NAMES))

    @property
    def runs_as_stored(self) -> bool:
        return bool(self._kinds() - set(DENSE_TYPES)) and self._kinds() <= {*DENSE_TYPES, *_NAMES}

    def _kinds(self) -> set[int]:
        return {tensor.kind for tensor in self._tensors.values() if len(tensor.dimensions) > 1}

    def matrix(self, layer: int, name: str) -> Blocks | None:
        """Returns q, k, v, o, gate, up or down; None if dense. Raises CheckpointError for an unknown format."""
        return self.block(f"blk.{layer}.{MATRIX_NAMES[name]}.weight")

    def head(self) -> Blocks | None:
        """Returns the output matrix, or a tied embedding, like `matrix`."""
        return self.block("output.weight" if "output.weight" in self._tensors else "token_embd.weight")

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def arrays(self, *names: str) -> list[list[Any]]:
        return [self.header.array(name) or [] for name in names]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).dimensions[::-1]

    def stored(self, name: str) -> Stored:
        """Returns numbers, blocks dequantised to float32, rows as in `matrix`. Raises CheckpointError."""
        import gguf

        tensor = self._entry(name)
        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            inputs, size = gguf.GGML_QUANT_SIZES[kind]
            rows = self._in_our_order(tensor, self._rows(tensor, BlockFormat(tensor.kind, inputs, size)))
            if dtype := DENSE_TYPES.get(tensor.kind):
                return Stored(dtype, rows.view(STORAGE[dtype]).reshape(self.shape(name)))
            floats = _q8_0_floats(rows) if kind == gguf.GGMLQuantizationType.Q8_0 else gguf.dequantize(rows, kind)
            return of_floats(floats.reshape(self.shape(name)))
        except (ValueError, KeyError, NotImplementedError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self._file}: {name}, of type {tensor.kind}, cannot be dequantised") from None

    def _entry(self, name: str) -> TensorEntry:
        if (tensor := self._tensors.get(name)) is None:
            raise CheckpointError(f"{self._file}: has no {name}")
        return tensor

    def numbers(self, name: str) -> list[float]:
        return [float(each) for each in self.stored(name).floats().reshape(-1)]

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def block(self, name: str) -> Blocks | None:
        """Returns blocks; None if dense. Raises CheckpointError for an unknown format."""
        tensor = self._entry(name)
        if tensor.kind in DENSE_TYPES:
            return None
        if (format := _NAMES.get(tensor.kind)) is None:
            known = ", ".join(_NAMES.values()).upper()
            stored = _kind_name(tensor.kind)
            raise CheckpointError(f"{self._file}: {name} is stored as {stored}; what runs as stored is {known}")
        form = (FORMATS | REPACKED)[format]
        rows = self._rows(tensor, form)
        return Blocks(form.into or format, self._in_our_order(tensor, repacked(rows, format) if form.into else rows))

    def _rows(self, tensor: TensorEntry, form: BlockFormat) -> NDArray[np.uint8]:
        inputs, outputs = tensor.dimensions[0], math.prod(tensor.dimensions[1:])
        size = inputs // form.inputs * form.bytes
        file, (header, content) = next(part for part in self._parts.items() if tensor.name in part[1][0].tensors)
        begin = header.begin + tensor.offset
        if inputs % form.inputs or begin + outputs * size > len(content):
            raise CheckpointError(f"{file}: {tensor.name} does not lie in it whole")
        return np.frombuffer(content, np.uint8, outputs * size, begin).reshape(outputs, size)

    def _in_our_order(self, tensor: TensorEntry, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        # transformers has all first members of rotary pairs, then all second ones.
        architecture = self.header.values.get("general.architecture")
        kind = tensor.name.split(".")[-2]
        turned = any(each.turned and each.gguf == architecture for each in table()["native"].values())
        if not turned or kind not in ("attn_q", "attn_k"):
            return rows
        try:
            heads = self.header.whole(f"{architecture}.attention.head_count")
            if kind == "attn_k":
                heads = self.header.whole(f"{architecture}.attention.head_count_kv", heads)
        except MalformedHeader as error:
            raise CheckpointError(f"{self._file}: {error}") from None
        outputs = tensor.dimensions[-1]  # of a bias, whose one row has a number for each
        if outputs % (2 * heads) or rows.size % outputs:
            raise CheckpointError(f"{self._file}: {tensor.name} has {outputs} rows, not pairs of {heads} heads")
        pairs = rows.reshape(heads, outputs // heads // 2, 2, rows.size // outputs)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _kind_name(kind: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"

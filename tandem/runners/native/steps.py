"""The base of packed models: threads, steps over rows of tokens at positions of slots, and hidden states."""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import math
import mmap
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_float, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.family_configs import NO_ROPE, FamilyConfig
from tandem.checkpoints.head_config import HeadConfig
from tandem.checkpoints.numbers import STORAGE, Floats, Stored
from tandem.runners.capabilities import FeatureRow
from tandem.runners.native import NativeUnavailable
from tandem.runners.native.library import Ints, ModelShape, RowBatch, ints, pointer, zeros
from tandem.runners.native.rotary import TYPES
from tandem.speculation.draws import best_token
from tandem.speculation.processing import Mask
from tandem.speculation.rejection import Logits
from tandem.speculation.rules import reported
from tandem.speculation.types import TokenLogprobs

DTYPES = {"float32": 0, "bfloat16": 1}
Ids = NDArray[np.int64]
log = logging.getLogger("tandem.engine")
_FAILED = {
    1: "memory: the packed weights do not fit",
    2: "the rows of one panel (of q, k and v, or of gate and up) are stored in different formats",
}


class TileState(enum.IntEnum):
    """Whether this process uses AMX tiles: TileState of quantised.h. OFF: for bfloat16 weights alone."""

    NONE = 0
    USED = 1
    REFUSED = 2
    OFF = 3


_TILES = {
    TileState.USED: "products of bfloat16 weights, and of quantised ones and 9 or more tokens, go through AMX tiles",
    TileState.REFUSED: "this CPU has AMX tiles; the system refuses them, so products go without",
}


def use_tiles(library: Any, use: bool = True) -> TileState:
    """Switches AMX tiles for quantised weights on, if this process can use them, or off for all its models."""
    return TileState(library.tandem_tiles(int(use)))


@functools.cache
def log_tiles(state: TileState) -> None:
    if state in _TILES:
        log.info(_TILES[state])


class Threads:
    """The thread pool shared by the models of one device thread."""

    def __init__(self, library: Any, count: int) -> None:
        self.library, self.count = library, count
        log_tiles(use_tiles(library))  # before there are threads: the system gives tiles to a process
        self.handle = library.tandem_pool(count)
        if not self.handle:
            raise NativeUnavailable(f"threads: {count} cannot be started")
        weakref.finalize(self, library.tandem_pool_free, self.handle)


@dataclass(frozen=True, slots=True, eq=False)
class NativeFeatures:
    """Features in `memory` taken as it is written; pages shared by two slots are never freed."""

    stored: Stored  # [slots, length, 3 * hidden], float32 or bfloat16
    memory: mmap.mmap
    embedding: Stored  # the target's, [vocabulary, hidden]

    @property
    def values(self) -> NDArray[Any]:
        """The numbers of `stored`, bfloat16 as bits."""
        return self.stored.values

    def read(self, rows: Sequence[FeatureRow]) -> list[Floats]:
        return [
            Stored(self.stored.dtype, self.values[row.slot, row.start : row.start + row.count].copy()).floats()
            for row in rows
        ]

    @property
    def spare_bytes(self) -> int:
        return (len(self.values) + 1) * mmap.PAGESIZE

    def slot_bytes(self, positions: int) -> int:
        """Maximum bytes of a slot's own pages for its first `positions`."""
        return min(positions, self.values.shape[1]) * self.values[0, 0].nbytes + mmap.PAGESIZE

    def give_back(self, slot: int, positions: int = 0) -> None:
        """Frees a slot's memory beyond its first `positions`."""
        start = (slot * self.values.shape[1] + positions) * self.values[0, 0].nbytes
        start, end = -(-start // mmap.PAGESIZE), (slot + 1) * self.values[0].nbytes // mmap.PAGESIZE
        if start < end:
            self.memory.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE)


def features_of(shape: tuple[int, int, int], dtype: str, embedding: Stored) -> NativeFeatures:
    """Zeroed features [slots, length, numbers] in "F32" or "BF16"."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(STORAGE[dtype]).itemsize, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return NativeFeatures(Stored(dtype, np.frombuffer(memory, STORAGE[dtype]).reshape(shape)), memory, embedding)


class NativeSteps:
    """Runs rows of tokens at positions of slots, like TorchModel; a subclass packs the weights.

    `tables`: each rotary embedding's cosines and sines, float32 [length, turned]. `embedding`: [vocabulary, hidden],
    shared. `cache`: slots, positions of each, most tokens of a step. `draft_vocab`: tokens of the outputs; None: all.
    `form`: fields of ModelShape.
    """

    def __init__(
        self,
        threads: Threads,
        dtype: str,
        config: FamilyConfig | HeadConfig,
        layers: int,
        cache: tuple[int, int, int],
        embedding: Stored,
        tables: Sequence[tuple[Floats, Floats]],
        draft_vocab: Sequence[int] | None = None,
        **form: float,
    ) -> None:
        self.threads, self.library, self.dtype = threads, threads.library, dtype
        self.device, self.vocab_size = "cpu", config.vocab_size
        self.draft_vocab: NDArray[np.int32] | None = (
            None if draft_vocab is None else np.array(draft_vocab, dtype=np.int32)
        )
        self.output_to_token: Ints | None = None if draft_vocab is None else ints(draft_vocab)
        self.outputs, self.layer_count = config.vocab_size if draft_vocab is None else len(draft_vocab), layers
        slots, length, self.most_tokens = cache
        values = {
            "layers": layers,
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "intermediate": config.intermediate_size,
            "outputs": self.outputs,
            "vocabulary": len(embedding.values),
            "slots": slots,
            "length": length,
            "most_tokens": self.most_tokens,
            "threads": threads.count,
            "epsilon": config.rms_norm_eps,
            "scale": config.head_dim**-0.5,
        }
        self.sizes = sizes = ModelShape(**values | form)
        self.own_features: NativeFeatures | None = None
        self._scratch = np.empty((0, self.outputs), dtype=np.float32)
        self._wide = np.empty((0, config.vocab_size), dtype=np.float32)
        self.embedding, self.tables = embedding, tables
        self.handle = self.library.tandem_model(
            threads.handle, DTYPES[dtype], ctypes.byref(sizes), embedding.values.ctypes.data
        )
        if not self.handle:
            raise NativeUnavailable("memory: the KV slots do not fit")
        weakref.finalize(self, self.library.tandem_model_free, self.handle)

    def sight(self, rope: int, window: int = 0) -> dict[str, int]:
        """Fields of LayerWeights for a layer's rotary embedding (or NO_ROPE) and window."""
        if rope == NO_ROPE:
            return {"window": window}
        cosines, sines = self.tables[rope]
        tables = {"cosines": cosines.ctypes.data, "sines": sines.ctypes.data}
        return {**tables, "turned": cosines.shape[1], "window": window}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed matrices, which every step reads."""
        return int(self.library.tandem_weight_bytes(self.handle))

    def slot_bytes(self, positions: int) -> int:
        """Bytes of pages for a slot's first `positions`, features included."""
        features = self.own_features.slot_bytes(positions) if self.own_features else 0
        return features + int(self.library.tandem_slot_bytes(self.handle, min(positions, self.sizes.length)))

    @property
    def spare_bytes(self) -> int:
        return self.own_features.spare_bytes if self.own_features else 0

    def give_back(self, slot: int, positions: int = 0) -> None:
        """Frees a slot's memory beyond its first `positions`."""
        self.library.tandem_give_back(self.handle, slot, positions)
        if self.own_features:
            self.own_features.give_back(slot, positions)

    def feed(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        wants: int = 2,
        adapters: Sequence[int] = (),
    ) -> NDArray[np.float32] | None:
        """Feeds ragged rows; returns float32 logits of `wants`: 2: all tokens, 1: last ones, 0: none."""
        return self.feed_batch(RowBatch(slots, starts, tokens, adapters), wants)

    def feed_batch(self, batch: RowBatch, wants: int) -> NDArray[np.float32] | None:
        count = (0, int(batch.rows.count), int(batch.begins[-1]))[wants]
        logits = np.empty((count, self.outputs), dtype=np.float32) if count else None
        self.library.tandem_feed(self.handle, ctypes.byref(batch.rows), wants, pointer(logits, c_float))
        return logits

    def room(self, rows: int) -> NDArray[np.float32]:
        """Reused buffer for logits [rows, outputs], valid until the next call."""
        if len(self._scratch) < rows:
            self._scratch = np.empty((rows, self.outputs), dtype=np.float32)
        return self._scratch[:rows]

    def forward(
        self, slots: Sequence[int], tokens: Ids, starts: Ids, length: int | None = None, head: bool = True
    ) -> Floats:
        """Logits [rows, width, vocabulary] of tokens [rows, width] at starts [rows]; ignores `length`."""
        rows, width = tokens.shape
        logits = self.feed(slots, starts.tolist(), tokens.tolist(), 2 if head else 0)
        return np.empty(0, np.float32) if logits is None else logits.reshape(rows, width, -1)

    def logprobs(self, logits: Sequence[Logits], tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
        # a tenth of the time of tandem.speculation.rules.all_logprobs
        rows = [np.ascontiguousarray(row) for row in logits]
        top, totals = min(top, len(rows[0])), (c_double * len(rows))()
        ids = zeros(len(rows) * top)
        addresses = (c_void_p * len(rows))(*(row.ctypes.data for row in rows))
        self.library.tandem_logprobs(self.threads.handle, addresses, len(rows), len(rows[0]), top, totals, ids)
        return tuple(
            reported(row, token, ids[r * top : (r + 1) * top], totals[r])
            for r, (row, token) in enumerate(zip(rows, tokens, strict=True))
        )

    def best_within(self, logits: Logits, mask: Mask) -> int:
        """Argmax of logits, float32 [outputs], within `mask`, bool [vocabulary]; -1 if it is empty."""
        if len(mask) < self.vocab_size:
            mask = np.concatenate([mask, np.zeros(self.vocab_size - len(mask), dtype=np.bool_)])
        allowed = mask[: self.vocab_size] if self.draft_vocab is None else mask[self.draft_vocab]
        best = best_token(np.where(allowed, logits, np.float32(-np.inf)))
        return best if best < 0 or self.output_to_token is None else self.output_to_token[best]

    def widened(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [rows, vocabulary], -inf for tokens that the head lacks; valid until the next call."""
        if self.draft_vocab is None:
            return logits
        if len(self._wide) < len(logits):
            self._wide = np.full((len(logits), self.vocab_size), -np.inf, dtype=np.float32)
        wide = self._wide[: len(logits)]
        wide[:, self.draft_vocab] = logits
        return wide

    def tensor(self, values: Sequence[Sequence[int]] | Sequence[int]) -> Ids:
        return np.array(values, dtype=np.int64)

    def done(self, failed: int) -> None:
        if failed:
            raise NativeUnavailable(_FAILED.get(failed, "a layer that the model does not have"))


def check_steps(dtype: str, ropes: Sequence[Mapping[str, Any]], **sizes: int) -> None:
    """Raises NativeUnavailable for dtypes, rotary embeddings and sizes that the C++ step does not compute."""
    if dtype not in DTYPES:
        raise NativeUnavailable(f"weights in {dtype} (there are float32 and bfloat16)")
    for rope in ropes:
        if (kind := rope.get("rope_type", "default")) not in TYPES:
            raise NativeUnavailable(f"rotary embedding of type {kind}")
    for name, value in sizes.items():
        multiple = 2 if name == "intermediate_size" else 16
        if value % multiple:
            raise NativeUnavailable(f"{name} {value} (only multiples of {multiple})")

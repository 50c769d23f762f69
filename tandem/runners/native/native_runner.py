"""Runs native steps: ragged rows without padding; a round is one call into C++."""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from ctypes import c_double, c_float
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.adapter_files import Adapter
from tandem.runners.batch_invariance import check_batch_invariance
from tandem.runners.capabilities import Capabilities, FeaturesOut, MemoryOnDemand, Pages, Trait
from tandem.runners.fused_step import to_verify
from tandem.runners.native.compilation import sources_hash
from tandem.runners.native.library import DRAW, Drawing, Ints, RowBatch, Sampling, each_alone, ints, pointer, zeros
from tandem.runners.native.packed_model import NativeModel
from tandem.runners.native.steps import NativeFeatures, NativeSteps
from tandem.runners.protocol import (
    CHUNKS_AT_ONCE,
    TAIL,
    FusedResult,
    FusedRow,
    FusedStep,
    Limits,
    PrefillRow,
    Proposal,
    ProposeRow,
    RowFailed,
    Runner,
    RunnerIdentity,
    StepShapes,
    VerifyRow,
    draft_next,
    sized,
    verdict_or_failure,
    verify_row,
)
from tandem.runners.startup import Startup
from tandem.speculation.draws import BadLogits
from tandem.speculation.rules import settled
from tandem.speculation.types import SparseDistribution, Verdict

Logits = NDArray[np.float32]
_COMPARED = 64  # positions whose rotary embedding is compared; the number of positions may differ
_MAPPED = 2**26  # bytes of kept pages that are mapped at start
_UNSOUND = "target logits: no finite largest logit"


class NativeRunner:
    """Runs one model. `verifies`: a target, whose batch invariance is checked, by `certified` if it passed before."""

    def __init__(
        self,
        model: NativeSteps,
        limits: Limits,
        identity: RunnerIdentity,
        verifies: bool = True,
        certified: Callable[[Callable[[], bool]], bool] = lambda check: check(),
    ) -> None:
        self.model, self.limits, self.identity = model, limits, identity
        self._verifies, self._certified = verifies, certified
        widest = limits.max_draft + 1 if verifies else TAIL
        self.shapes = StepShapes(
            tuple(range(1, widest + 1)),
            tuple(range(1, limits.slots + 1)),
            False,
            chunks=tuple(range(1, limits.chunk + 1)),
            ragged=True,
        )

    def warm_up(self, startup: Startup | None = None) -> None:
        if self._verifies:
            with (startup or Startup()).stage("certifying"):
                self.shapes = replace(self.shapes, bit_exact=self._certified(self._is_exact))
        for slot in range(self.limits.slots):
            self.model.give_back(slot)

    def _is_exact(self) -> bool:
        # invariance holds by construction; without padding a few shapes represent all
        limits = self.limits
        widths, batches = tuple(sorted({1, 2, limits.max_draft + 1})), tuple(sorted({1, limits.slots}))
        chunks = (max(1, limits.chunk // 4), limits.chunk)
        return check_batch_invariance(self.model, limits, widths, batches, chunks=chunks).bit_exact

    @property
    def capabilities(self) -> Capabilities:
        # a draft's bits are the same by construction; a target's were checked too
        model, exact = self.model, self.shapes.bit_exact or not self._verifies
        return Capabilities(
            traits=frozenset(() if exact else {Trait.INEXACT}),
            pages=Pages(page_bytes(model), page_format(model), self.page_store),
            adapters=self.put_adapter,
            memory_on_demand=self.memory_on_demand,
            features_out=FeaturesOut(model.layer_count, int(model.sizes.hidden), self.hand_out),
            shared_steps=True,
        )

    @property
    def memory_on_demand(self) -> MemoryOnDemand:
        return MemoryOnDemand(self.model.spare_bytes, self.kv_bytes, self.give_back)

    def page_store(self, pages: int) -> NativePages:
        return NativePages(self.model, pages)

    def kv_bytes(self, tokens: int) -> int:
        # nothing is padded, but drafts may exceed a sequence
        return self.model.slot_bytes(tokens + self.limits.max_draft + 1)

    def give_back(self, slot: int, tokens: int = 0) -> None:
        self.model.give_back(slot, tokens + self.limits.max_draft + 1 if tokens else 0)

    def put_adapter(self, number: int, adapter: Adapter) -> None:
        assert isinstance(self.model, NativeModel)
        self.model.put_adapter(number, adapter)

    @each_alone
    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        self.model.feed_batch(self._batch(rows, [row.start for row in rows], [row.tokens for row in rows]), 0)
        return [None] * len(rows)

    @each_alone
    def verify(self, rows: Sequence[VerifyRow | PrefillRow]) -> list[Any]:
        judged, batch = [row.then if isinstance(row, PrefillRow) else row for row in rows], _fed(rows)
        if batch.begins[-1] > self.model.most_tokens and (half := len(rows) // 2):
            return [*self.verify(rows[:half]), *self.verify(rows[half:])]  # predictions draft as widely as a chunk
        begins = [0, *itertools.accumulate(len(row.fed) if row else 0 for row in judged)]
        said, accepted = zeros(begins[-1]), zeros(len(rows))
        logits = None if all(row is None or row.plain for row in judged) else self.model.room(begins[-1])
        sampled = None if logits is None else sampled_rows(judged, self.model.outputs)
        batch.rows.quiet = ints([len(row.tokens) if isinstance(row, PrefillRow) else 0 for row in rows])
        self.model.library.tandem_verify(
            self.model.handle, ctypes.byref(batch.rows), sampled, said, accepted, pointer(logits, c_float)
        )
        found = list[Any]()
        for row, own, begin, n in zip(rows, judged, begins, accepted, strict=False):
            verdict = own and (_verdict(said, begin, n) if own.drawn else self._judge(own, said, logits, begin))
            found.append(None if own is not row and isinstance(verdict, RowFailed) else verdict)  # the chunk succeeded
        return found

    def _judge(self, row: VerifyRow, said: Ints, logits: Logits | None, begin: int) -> Verdict | RowFailed:
        assert logits is not None
        own, best = logits[begin:], said[begin : begin + 1 + len(row.draft)]
        return verdict_or_failure(lambda: verify_row(row, own.__getitem__, self.model.logprobs, best.__getitem__))

    def verify_logits(self, rows: Sequence[VerifyRow]) -> list[Logits]:
        """Each row's logits [1 + draft tokens, vocabulary], float32; entry i predicts the token after draft[:i]."""
        batch = _fed(rows)
        logits = self.model.feed_batch(batch, 2)
        assert logits is not None
        return np.split(logits, batch.begins[1:-1])

    @each_alone
    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        started = time.perf_counter()
        tails, counts = self._tails(rows), ints([row.k for row in rows])
        stride, drawing = max(1, *(row.k for row in rows)), DraftDraws.of(self.model, rows)
        drafts = zeros(len(rows) * stride)
        self.model.library.tandem_propose(
            self.model.handle,
            ctypes.byref(tails.rows),
            counts,
            self.model.output_to_token,
            stride,
            drafts,
            drawing and ctypes.byref(drawing.passed()),
        )
        sent = drawing.finished() if drawing else [()] * len(rows)
        seconds = time.perf_counter() - started
        return [
            Proposal(tuple(drafts[r * stride : r * stride + count]), seconds, sent[r], _doubted(rows[r], count))
            for r, count in enumerate(counts)
        ]

    def _tails(self, rows: Sequence[ProposeRow]) -> RowBatch:
        return self._batch(rows, [row.position + 1 - len(row.tail) for row in rows], [row.tail for row in rows])

    def _batch(
        self, rows: Sequence[PrefillRow] | Sequence[ProposeRow], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> RowBatch:
        return RowBatch([row.slot for row in rows], starts, tokens, [row.adapter for row in rows])

    def fused_with(self, draft: Runner) -> FusedStep | None:
        """Drafts and verifies in one library call, if the draft is native."""
        return functools.partial(self._fused, draft) if isinstance(draft, NativeRunner) else None

    def hand_out(self, layers: Sequence[int]) -> NativeFeatures:
        # steps write straight into the features
        assert isinstance(self.model, NativeModel)
        return self.model.hand_out(layers)

    def _fused(self, draft: NativeRunner, rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
        asked, adapters = [row.propose for row in rows], [row.adapter for row in rows]
        tails = draft._tails(asked)
        stride = max(1, *(max(row.propose.k, len(row.copied)) for row in rows))
        counts = ints([len(row.copied) or row.propose.k for row in rows])
        drafts, said, accepted = zeros(len(rows) * stride), zeros(len(rows) * (stride + 1)), zeros(len(rows))
        for r, row in enumerate(rows):
            drafts[r * stride : r * stride + len(row.copied)] = list(row.copied)
        drawing = DraftDraws.of(draft.model, asked)
        logits = None if all(row.plain for row in rows) else self.model.room(len(said))
        seconds = c_double()
        self.model.library.tandem_fused(
            draft.model.handle,
            self.model.handle,
            ctypes.byref(tails.rows),
            counts,
            ints([bool(row.copied) for row in rows]),
            ints(adapters) if any(adapters) else None,
            draft.model.output_to_token,
            self.limits.vocab_size,
            stride,
            drafts,
            None if logits is None else sampled_rows(rows, self.model.outputs),
            said,
            accepted,
            pointer(logits, c_float),
            drawing and ctypes.byref(drawing.passed()),
            ctypes.byref(seconds),
        )
        sent = drawing.finished() if drawing else [()] * len(rows)
        widths, begin = [1 + count for count in counts], 0
        results: list[FusedResult | RowFailed] = []
        for r, row in enumerate(rows):
            drafted = tuple(drafts[r * stride : r * stride + counts[r]])
            doubted = _doubted(row.propose, counts[r])
            proposal = Proposal(drafted, 0.0 if row.copied else seconds.value, sent[r][: len(drafted)], doubted)
            drawn = _verdict(said, begin, accepted[r]) if row.drawn else None
            verdict = drawn or self._judge(to_verify(row, proposal), said, logits, begin)
            results.append(FusedResult(proposal, verdict, seconds.value) if isinstance(verdict, Verdict) else verdict)
            begin += widths[r]
        return sized(results, self.shapes, widths)


def _doubted(row: ProposeRow, drafted: int) -> bool:
    return 0 < drafted < row.k and row.least > 0 and row.drawn  # others end for other reasons


def most_tokens(limits: Limits, verifies: bool = False) -> int:
    """Tokens of the largest step: of drafts with tails of up to a chunk, or of a target with CHUNKS_AT_ONCE."""
    if verifies:
        return limits.slots * max(limits.max_draft + 1, TAIL) + CHUNKS_AT_ONCE * limits.chunk
    return (limits.slots + 1) * max(TAIL, limits.chunk)


def _fed(rows: Sequence[VerifyRow | PrefillRow]) -> RowBatch:
    starts = [row.start if isinstance(row, PrefillRow) else row.position for row in rows]
    return RowBatch([r.slot for r in rows], starts, [r.fed for r in rows], [r.adapter for r in rows])


def _verdict(said: Ints, begin: int, accepted: int) -> Verdict | RowFailed:
    return RowFailed(_UNSOUND) if accepted < 0 else Verdict(tuple(said[begin : begin + accepted + 1]), accepted)


def sampled_rows(rows: Sequence[VerifyRow | ProposeRow | FusedRow | None], tokens: int) -> Any:
    """Sampling structures over `tokens` ids, from the position after each row's last; None: all greedy."""
    made = None
    for r, row in enumerate(rows):
        asked = row.propose if isinstance(row, FusedRow) else row
        if row and asked and row.drawn and not (by := asked.request.sampling).greedy:
            made = made or (Sampling * len(rows))()
            top_k = min(by.top_k, tokens)
            made[r] = Sampling(by.temperature, by.top_p, by.min_p, by.seed, asked.position + 1, top_k, tokens)
    return made


class DraftDraws:
    """The draft tokens of one call; the library calls back on the calling thread."""

    def __init__(self, model: NativeSteps, rows: Sequence[ProposeRow]) -> None:
        self._model, self._rows = model, rows
        self._drafted: list[list[int]] = [[] for _ in rows]
        self._sent: list[list[SparseDistribution]] = [[] for _ in rows]
        self._error: Exception | None = None
        self._logits = model.room(len(rows))

    @classmethod
    def of(cls, model: NativeSteps, rows: Sequence[ProposeRow]) -> DraftDraws | None:
        """None if the library chooses all draft tokens itself."""
        return None if all(not row.k or (row.plain and not row.least) for row in rows) else cls(model, rows)

    def passed(self) -> Drawing:
        # not kept, because it keeps this object alive
        others, model = ints([not row.drawn for row in self._rows]), self._model
        least = (c_float * len(self._rows))(*(row.least if row.drawn else 0.0 for row in self._rows))
        sampled = sampled_rows(self._rows, model.outputs if model.draft_vocab is None else model.vocab_size)
        return Drawing(others, sampled, pointer(self._logits, c_float), DRAW(self._draw), least)

    def finished(self) -> list[tuple[SparseDistribution, ...]]:
        """Each draft token's distribution, by row. Raises a draw's exception."""
        if self._error:
            raise self._error
        return [tuple(sent) for sent in self._sent]

    def _draw(self, row: int, at: int, best: int) -> int:
        # -1 ends the draft; the library would lose an exception
        if self._error:
            return -1
        try:
            token, drawn_from = self._next(row, at, best, self._drafted[row])
        except BadLogits:
            return -1  # the draft ends where its structure became too complex to follow
        except Exception as error:
            self._error = error
            return -1
        if token < 0:
            return token
        self._drafted[row].append(token)
        self._sent[row] += [drawn_from] if drawn_from else []
        return token

    def _next(self, index: int, at: int, best: int, drafted: Sequence[int]) -> tuple[int, SparseDistribution | None]:
        row = self._rows[index]
        if settled(best, row.request.sampling, row.processor, drafted):
            return best, None
        if row.request.sampling.greedy and row.processor and (mask := row.processor.mask(drafted)) is not None:
            return self._model.best_within(self._logits[at], mask), None
        return draft_next(row, self._model.widened(self._logits[at : at + 1])[0], drafted)


class NativePages:
    """Implements PageStore."""

    def __init__(self, model: NativeSteps, pages: int) -> None:
        size, line = pages * page_bytes(model), 64
        whole = np.empty(size + line, dtype=np.uint8)
        whole[:_MAPPED].fill(0)  # memory is mapped when first written, and that would slow down a prompt
        begin = -whole.ctypes.data % line  # else, 16 bytes off, copies to it took 7 times as long on an EPYC
        self._model, self._memory = model, whole[begin : begin + size].reshape(pages, -1)
        self._address = self._memory.ctypes.data

    def save(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self._copy(slot, first, pages, 0)

    def load(self, slot: int, first: int, pages: Sequence[int]) -> None:
        self._copy(slot, first, pages, 1)

    def _copy(self, slot: int, first: int, pages: Sequence[int], back: int) -> None:
        place = ints(pages), self._address, len(self._memory)
        self._model.library.tandem_copy_pages(self._model.handle, slot, first, len(pages), *place, back)

    def read(self, page: int) -> bytes:
        return self._memory[page].tobytes()

    def write(self, page: int, data: bytes) -> None:
        self._memory[page] = np.frombuffer(data, dtype=np.uint8)


def page_bytes(model: NativeSteps) -> int:
    return int(model.library.tandem_page_bytes(model.handle))


def page_format(model: NativeSteps) -> str:
    """Names sources, shape, rotary tables, and instructions unless in float32, which all fusing CPUs compute alike."""
    sizes, rotary = model.sizes, b"".join(table[:_COMPARED].tobytes() for each in model.tables for table in each)
    said = f"native {sources_hash()[:16]}, {sizes.layers} layers of {sizes.kv_heads} heads of {sizes.head_dim}"
    said += f", rotary embedding {zlib.crc32(rotary):08x}"
    instructions = model.library.tandem_instructions().decode()
    return said if model.dtype == "float32" and instructions != "two roundings" else f"{said}, {instructions}"

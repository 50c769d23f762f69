"""Runs the steps on a NativeModel: ragged rows, no padding, no buckets; a greedy round is one call into C++."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from ctypes import c_double
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tandem.runners.batch_invariance import check_batch_invariance
from tandem.runners.native.library import Ints, RowBatch, ints, zeros
from tandem.runners.native.model import NativeModel
from tandem.runners.protocol import (
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
    fused_step,
    sized,
    verdict_or_failure,
)
from tandem.runners.startup import Startup
from tandem.speculation.rules import draft_token, verify_draft
from tandem.speculation.types import SparseDistribution, Verdict

Logits = NDArray[np.float32]
_UNSOUND = "target logits: no finite largest logit"


class NativeRunner:
    """Runs one model. `verifies`: it is a target, so its batch invariance is checked; false for a draft."""

    def __init__(self, model: NativeModel, limits: Limits, identity: RunnerIdentity, verifies: bool = True) -> None:
        self.model, self.limits, self.identity, self._verifies = model, limits, identity, verifies
        widest = limits.max_draft + 1 if verifies else TAIL
        self.shapes = StepShapes(
            tuple(range(1, widest + 1)),
            tuple(range(1, limits.slots + 1)),
            False,
            chunks=tuple(range(1, limits.chunk + 1)),
            ragged=True,
        )

    def warm_up(self, startup: Startup | None = None) -> None:
        if not self._verifies:
            return
        with (startup or Startup()).stage("certifying"):
            self.shapes = check_ragged_invariance(self.model, self.limits, self.shapes)

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        self.model.feed([r.slot for r in rows], [r.start for r in rows], [r.tokens for r in rows], 0)
        return [None] * len(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        if all(row.sampling.greedy and not row.margins for row in rows):
            return self._verify_greedily(rows)
        return [
            verdict_or_failure(functools.partial(_verify_row, row, own))
            for row, own in zip(rows, self.verify_logits(rows), strict=True)
        ]

    def verify_logits(self, rows: Sequence[VerifyRow]) -> list[Logits]:
        """Each row's logits [1 + draft tokens, vocabulary], float32; entry i predicts the token after draft[:i]."""
        tokens = [(row.last_token, *row.draft) for row in rows]
        logits = self.model.feed([row.slot for row in rows], [row.position for row in rows], tokens)
        assert logits is not None
        return np.split(logits, np.cumsum([len(own) for own in tokens])[:-1])

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        """Like Runner.propose; a row leaves the batch once it has its k tokens."""
        started = time.perf_counter()
        greedy = all(row.sampling.greedy for row in rows)
        drafts = self._propose_greedily(rows) if greedy else self._propose_drawn(rows)
        seconds = time.perf_counter() - started
        return [Proposal(tokens, seconds, sent) for tokens, sent in drafts]

    def fused_with(self, draft: Runner) -> FusedStep | None:
        """Drafts and verifies greedy rows in one call of the library, if the draft is native too."""
        return functools.partial(self._fused, draft) if isinstance(draft, NativeRunner) else None

    def _fused(self, draft: NativeRunner, rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
        if not all(row.propose.sampling.greedy and not row.margins for row in rows):
            return fused_step(self, draft, rows)
        tails = _tails([row.propose for row in rows])
        stride = max(1, *(max(row.propose.k, len(row.copied)) for row in rows))
        counts = ints([len(row.copied) or row.propose.k for row in rows])
        drafts, committed, accepted = zeros(len(rows) * stride), zeros(len(rows) * (stride + 1)), zeros(len(rows))
        for r, row in enumerate(rows):
            drafts[r * stride : r * stride + len(row.copied)] = list(row.copied)
        seconds = c_double()
        self.model.library.tandem_fused(
            draft.model.handle,
            self.model.handle,
            ctypes.byref(tails.rows),
            counts,
            ints([bool(row.copied) for row in rows]),
            draft.model.stands_for,
            self.limits.vocab_size,
            stride,
            drafts,
            committed,
            accepted,
            ctypes.byref(seconds),
        )
        widths = [1 + count for count in counts]
        results: list[FusedResult | RowFailed] = []
        for r, row in enumerate(rows):
            drafted = tuple(drafts[r * stride : r * stride + counts[r]])
            proposal = Proposal(drafted, 0.0 if row.copied else seconds.value)
            verdict = _verdict(committed, r * (stride + 1), accepted[r])
            results.append(verdict if isinstance(verdict, RowFailed) else FusedResult(proposal, verdict))
        return [sized(result, self.shapes, widths, seconds.value) for result in results]

    def _verify_greedily(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        batch = RowBatch(
            [row.slot for row in rows],
            [row.position for row in rows],
            [(row.last_token, *row.draft) for row in rows],
        )
        committed, accepted = zeros(len(batch.tokens)), zeros(len(rows))
        self.model.library.tandem_verify(self.model.handle, ctypes.byref(batch.rows), committed, accepted)
        return [_verdict(committed, begin, n) for begin, n in zip(batch.begins, accepted, strict=False)]

    def _propose_greedily(self, rows: Sequence[ProposeRow]) -> list[_Draft]:
        tails, counts = _tails(rows), ints([row.k for row in rows])
        stride = max(1, *(row.k for row in rows))
        drafts = zeros(len(rows) * stride)
        self.model.library.tandem_propose(
            self.model.handle,
            ctypes.byref(tails.rows),
            counts,
            self.model.stands_for,
            stride,
            drafts,
        )
        return [(tuple(drafts[r * stride : r * stride + count]), ()) for r, count in enumerate(counts)]

    def _propose_drawn(self, rows: Sequence[ProposeRow]) -> list[_Draft]:
        drafts: list[tuple[list[int], list[SparseDistribution]]] = [([], []) for _ in rows]
        active = [r for r, row in enumerate(rows) if row.k]
        while active:
            rounds = [(rows[r], drafts[r][0]) for r in active]
            logits = self.model.feed(
                [row.slot for row, _ in rounds],
                [row.position + (len(tokens) or 1 - len(row.tail)) for row, tokens in rounds],
                [tokens[-1:] or row.tail for row, tokens in rounds],
                1,
            )
            assert logits is not None
            for r, own in zip(active, self.model.widened(logits), strict=True):
                row, (tokens, sent) = rows[r], drafts[r]
                token, drawn_from = draft_token(
                    own, row.sampling, row.rule, row.position + 1 + len(tokens), row.target_vocab_size
                )
                tokens.append(token)
                sent += [drawn_from] if drawn_from else []
            active = [r for r in active if len(drafts[r][0]) < rows[r].k]
        return [(tuple(tokens), tuple(sent)) for tokens, sent in drafts]


_Draft = tuple[tuple[int, ...], tuple[SparseDistribution, ...]]


def _tails(rows: Sequence[ProposeRow]) -> RowBatch:
    return RowBatch([r.slot for r in rows], [r.position + 1 - len(r.tail) for r in rows], [r.tail for r in rows])


def _verdict(committed: Ints, begin: int, accepted: int) -> Verdict | RowFailed:
    """Parses one row's verdict from `committed[begin:]`."""
    return RowFailed(_UNSOUND) if accepted < 0 else Verdict(tuple(committed[begin : begin + accepted + 1]), accepted)


def _verify_row(row: VerifyRow, logits: Logits) -> Verdict:
    return verify_draft(
        row.draft, row.distributions, logits.__getitem__, row.sampling, row.rule, row.position + 1, row.margins
    )


def check_ragged_invariance(model: NativeModel, limits: Limits, shapes: StepShapes) -> StepShapes:
    """Checks batch invariance, which holds by construction, on this machine.

    A few shapes represent all, because none is padded.
    """
    widths = tuple(sorted({1, 2, limits.max_draft + 1}))
    batches = tuple(sorted({1, limits.slots}))
    found = check_batch_invariance(model, limits, widths, batches, chunks=(max(1, limits.chunk // 4), limits.chunk))
    return replace(shapes, bit_exact=found.bit_exact)

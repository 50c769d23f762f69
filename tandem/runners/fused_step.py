"""Fused steps: one call of a pair's runners if they have one, else `propose` and then `verify`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tandem.runners.protocol import (
    FusedResult,
    FusedRow,
    FusedStep,
    PrefillRow,
    Proposal,
    RowFailed,
    Runner,
    VerifyRow,
    verify_sized,
)
from tandem.speculation.types import Verdict


def fused(target: Runner, draft: Runner, fell_back: Callable[[Exception], object] = lambda error: None) -> FusedStep:
    """The pair's fused step. `fell_back` gets the error of a failed single call before the call is repeated as two."""
    apart, together = functools.partial(fused_step, target, draft), target.fused_with(draft)
    return apart if together is None else functools.partial(_together_or_apart, together, apart, fell_back)


def _together_or_apart(
    together: FusedStep, apart: FusedStep, fell_back: Callable[[Exception], object], rows: Sequence[FusedRow]
) -> list[FusedResult | RowFailed]:
    """Repeats a failed call as propose and verify, which shows whether the draft failed. Chunks always take two."""
    if isinstance(rows[-1], PrefillRow):
        return apart(rows)
    try:
        return together(rows)
    except Exception as error:
        fell_back(error)
        return apart(rows)


def fused_step(target: Runner, draft: Runner, rows: Sequence[Any]) -> list[Any]:
    """Runs the draft's `propose`, then the target's `verify`; if a draft fails, its rows are plain."""
    rounds = [row for row in rows if isinstance(row, FusedRow)]
    proposals = _proposals(draft, rounds)
    known = target.limits.vocab_size
    asked = [
        to_verify(row, p.within(known) if isinstance(p, Proposal) else Proposal(()))
        for row, p in zip(rounds, proposals, strict=True)
    ]
    verdicts = verify_sized(target, [*asked, *rows[len(rounds) :]])
    seconds = max((p.seconds for p in proposals if isinstance(p, Proposal)), default=0.0)
    results = [_fused_result(p, v, known, seconds) for p, v in zip(proposals, verdicts, strict=False)]
    return [*results, *verdicts[len(rounds) :]]


def _proposals(draft: Runner, rows: Sequence[FusedRow]) -> list[Proposal | RowFailed]:
    found: list[Proposal | RowFailed] = [Proposal(row.copied) for row in rows]
    asking = [i for i, row in enumerate(rows) if not row.copied and row.propose.k]
    if asking:
        try:
            proposals = draft.propose([rows[i].propose for i in asking])
        except Exception as error:
            proposals = [RowFailed(f"{type(error).__name__}: {error}")] * len(asking)
        for i, proposal in zip(asking, proposals, strict=True):
            found[i] = proposal
    return found


def _fused_result(
    proposal: Proposal | RowFailed, verdict: Verdict | RowFailed, vocab_size: int, draft_seconds: float
) -> FusedResult | RowFailed:
    if isinstance(verdict, RowFailed):
        return verdict
    if isinstance(proposal, RowFailed):
        return FusedResult(Proposal(()), verdict, draft_seconds, str(proposal))
    return FusedResult(proposal.within(vocab_size), verdict, draft_seconds)


def to_verify(row: FusedRow, proposal: Proposal) -> VerifyRow:
    """The row's verification of a proposal within the target's vocabulary."""
    p = row.propose
    ids, sent = proposal.token_ids, proposal.distributions
    return VerifyRow(p.slot, p.position, p.tail[-1], ids, p.request, sent, p.processor, row.adapter)

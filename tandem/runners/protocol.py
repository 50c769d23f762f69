"""What a model runner does: three steps over rows at different positions, each one host round trip.

A runner owns its models and their slot caches and is called from one thread, the device thread. Absolute positions
count from 0. A cache is valid up to some position; a step may start at any position not beyond that, and whatever was
written past its end is simply overwritten later: rollback is free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from tandem.runners.startup import Startup
from tandem.speculation.acceptance import known_prefix
from tandem.speculation.draws import BadLogits
from tandem.speculation.types import Rule, SamplingParams, SparseDistribution, Verdict


@dataclass(frozen=True, slots=True)
class Limits:
    """What a runner was built for. `max_length` counts tokens of a sequence, `chunk` tokens of a prefill step."""

    slots: int
    max_length: int
    max_draft: int
    chunk: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name, value, least in (
            ("batch", self.slots, 1),
            ("sequence_length", self.max_length, 2),
            ("speculation_length", self.max_draft, 0),
            ("prefill chunk", self.chunk, 1),
        ):
            if value < least:
                raise ValueError(f"{name}: {value} is below {least}")
        if self.max_draft >= self.max_length:
            raise ValueError(
                f"speculation_length: {self.max_draft} does not fit a sequence length of {self.max_length}"
            )


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Feed `tokens` (at most a chunk) at positions `start`, start+1, ... of `slot`."""

    slot: int
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """Feed the last committed token at `position` and the draft after it; decide by `rule` what is committed.

    `distributions`: what the draft's tokens were drawn from, under the rejection rule; empty: proposed for certain.
    """

    slot: int
    position: int
    last_token: int
    draft: tuple[int, ...]
    sampling: SamplingParams
    margins: bool = False
    rule: Rule = Rule.AGREEMENT
    distributions: tuple[SparseDistribution, ...] = ()


TAIL = 8  # committed tokens that a draft's first step can catch up on; behind by more, it prefills


@dataclass(frozen=True, slots=True)
class ProposeRow:
    """Draw `k` draft tokens after `tail`, the last committed tokens, at most `TAIL` of them.

    `position` is that of the last token of `tail`. Feeding more than one catches up on tokens that the draft model did
    not propose itself: two after a fully accepted draft, more after a copied one. `known` is how many of the first ids
    the target has, if not all: the rejection rule draws no others.
    """

    slot: int
    position: int
    tail: tuple[int, ...]
    k: int
    sampling: SamplingParams
    rule: Rule = Rule.AGREEMENT
    known: int | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens, the seconds they took, and what they were drawn from where the verifier must know."""

    token_ids: tuple[int, ...]
    seconds: float = 0.0
    distributions: tuple[SparseDistribution, ...] = ()

    def known(self, vocab_size: int) -> Proposal:
        """What comes before the first token that the target does not have."""
        ids = known_prefix(self.token_ids, vocab_size)
        return Proposal(ids, self.seconds, self.distributions[: len(ids)])


@dataclass(frozen=True, slots=True)
class FusedRow:
    """Propose and verify in one step; draft and target use the same slot number.

    `given` is a draft that is there already (copied); then the draft model proposes nothing for this row.
    """

    propose: ProposeRow
    margins: bool = False
    given: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FusedResult:
    """What was proposed and what the target made of it; `draft_seconds` all rows' proposals took together.

    `draft_failed` says why nothing was proposed, where the draft model is at fault.
    """

    proposal: Proposal
    verdict: Verdict
    draft_seconds: float = 0.0
    draft_failed: str = ""


@dataclass(frozen=True, slots=True)
class StepShapes:
    """Step shapes in use. `bit_exact`: all of them gave bit-identical logits for the same token on this device.

    widths: tokens per row. batches: rows. lengths: cache positions that attention reads (empty: always all).
    chunks: tokens of a prefill step, and prefill_lengths what it reads. `note` says why bits could not be compared.
    `ragged`: rows of one step may differ in width, and nothing is padded.
    """

    widths: tuple[int, ...]
    batches: tuple[int, ...]
    bit_exact: bool
    lengths: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    prefill_lengths: tuple[int, ...] = ()
    note: str = ""
    ragged: bool = False

    def step_tokens(self, widths: Sequence[int]) -> int:
        """Tokens of a step of rows this wide, padding included."""
        if self.ragged:
            return sum(widths)
        rows, widest = len(widths), max(widths)
        padded = min((b for b in self.batches if b >= rows), default=rows)
        return padded * min((w for w in self.widths if w >= widest), default=widest)

    def width(self, needed: int) -> int:
        return next(w for w in self.widths if w >= needed)

    def batch(self, rows: int) -> int:
        return next(b for b in self.batches if b >= rows)

    def length(self, end: int) -> int | None:
        """Positions to read for tokens before position `end`; None is the whole cache."""
        return next((n for n in self.lengths if n >= end), None)

    def prefill_length(self, end: int) -> int | None:
        return next((n for n in self.prefill_lengths if n >= end), None)

    def chunk(self, tokens: int) -> int:
        return next(c for c in self.chunks if c >= tokens)

    def inexact(self) -> StepShapes:
        """The same shapes, which are known not to give the same bits."""
        return replace(self, bit_exact=False)

    @property
    def count(self) -> int:
        """How many shapes a verification can take."""
        return len(self.widths) * len(self.batches) * (len(self.lengths) + 1)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a runner runs, for GetModelInfo. `greedy_only`: its logits never leave the device."""

    model_name: str
    weights_revision: str
    dtype: str
    device: str
    backend: str
    end_of_sequence_ids: tuple[int, ...] = field(default=())
    greedy_only: bool = False


class RowFailed(RuntimeError):
    """One row of a step failed; its neighbours did not. Its slot holds nothing from then on."""


class Runner(Protocol):
    """The steps every backend gives. A row that fails yields a RowFailed in its place; the others are unharmed."""

    @property
    def limits(self) -> Limits: ...

    @property
    def identity(self) -> Identity: ...

    @property
    def shapes(self) -> StepShapes: ...

    def warm_up(self, startup: Startup | None = None) -> None:
        """Compiles and runs every step once and settles `shapes`."""

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]: ...

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]: ...

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]: ...

    def fused_with(self, draft: Runner) -> FusedStep | None:
        """Draft and verification as one call, where this runner has one with that draft; else None."""


FusedStep = Callable[[Sequence[FusedRow]], list[FusedResult | RowFailed]]


def fused(target: Runner, draft: Runner) -> FusedStep:
    """The pair's fused step: one call where the runners have it, else one after the other on one device thread."""
    apart, together = functools.partial(fused_step, target, draft), target.fused_with(draft)
    return apart if together is None else functools.partial(_together_or_apart, together, apart)


def _together_or_apart(
    together: FusedStep, apart: FusedStep, rows: Sequence[FusedRow]
) -> list[FusedResult | RowFailed]:
    """A call that fails is made again in its parts: they tell whether it was the draft's fault."""
    try:
        return together(rows)
    except Exception:
        return apart(rows)


def sound(verdict: Callable[[], Verdict]) -> Verdict | RowFailed:
    """The verdict, or the row's failure where its logits are not numbers."""
    try:
        return verdict()
    except BadLogits as error:
        return RowFailed(f"target logits: {error}")


@runtime_checkable
class Fuses(Protocol):
    """A runner that may have one graph for a pair's whole round."""

    def fuse(self, draft: Runner, startup: Startup) -> None:
        """Makes it, at start, on the device thread, where that can be done."""


def fused_step(target: Runner, draft: Runner, rows: Sequence[FusedRow]) -> list[FusedResult | RowFailed]:
    """Draft and target one after the other."""
    proposals = _proposals(draft, rows)
    known = target.limits.vocab_size
    verdicts = verify_sized(target, [_to_verify(row, p, known) for row, p in zip(rows, proposals, strict=True)])
    seconds = max((p.seconds for p in proposals if isinstance(p, Proposal)), default=0.0)
    return [_fused_result(p, v, known, seconds) for p, v in zip(proposals, verdicts, strict=True)]


def sized(
    result: FusedResult | RowFailed, shapes: StepShapes, widths: Sequence[int], draft_seconds: float
) -> FusedResult | RowFailed:
    """With how large the step was that the rows shared, and what all their drafts took."""
    if isinstance(result, RowFailed):
        return result
    return replace(result, verdict=_sized(result.verdict, shapes, widths), draft_seconds=draft_seconds)


def _sized(verdict: Verdict, shapes: StepShapes, widths: Sequence[int]) -> Verdict:
    return replace(verdict, rows=len(widths), width=max(widths), step_tokens=shapes.step_tokens(widths))


def verify_sized(target: Runner, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
    """The target's verification; each verdict says how large the step was that the rows shared."""
    widths = [1 + len(row.draft) for row in rows]
    return [_sized(v, target.shapes, widths) if isinstance(v, Verdict) else v for v in target.verify(rows)]


def _proposals(draft: Runner, rows: Sequence[FusedRow]) -> list[Proposal | RowFailed]:
    """The draft model's for the rows that have none yet. Whatever it fails with, no row fails for it."""
    found: list[Proposal | RowFailed] = [Proposal(row.given) for row in rows]
    asking = [i for i, row in enumerate(rows) if not row.given and row.propose.k]
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
    return FusedResult(proposal.known(vocab_size), verdict, draft_seconds)


def _to_verify(row: FusedRow, proposal: Proposal | RowFailed, vocab_size: int) -> VerifyRow:
    """A row whose draft failed goes on undrafted."""
    p = row.propose
    known = proposal.known(vocab_size) if isinstance(proposal, Proposal) else Proposal(())
    return VerifyRow(
        p.slot, p.position, p.tail[-1], known.token_ids, p.sampling, row.margins, p.rule, known.distributions
    )

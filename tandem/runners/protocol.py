"""Defines the Runner protocol: prefill, verify and propose, each over rows at different positions.

A runner owns one model and its slot cache, and is called from a single thread, the device thread. Each step takes one
round trip between host and device. Positions are absolute and count from 0. A slot's cache is valid up to some
position; a step may start at any position up to that one, and overwrites whatever lies beyond, so rolling back costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tandem.runners.capabilities import Capabilities
from tandem.runners.startup import Startup
from tandem.speculation.acceptance import known_prefix
from tandem.speculation.draws import BadLogits, StructureFailed
from tandem.speculation.logprobs import Logits, LogprobsOf, all_logprobs
from tandem.speculation.model_info import Rehearsal
from tandem.speculation.processing import Processor
from tandem.speculation.rules import draft_token, verify_draft
from tandem.speculation.types import MAX_DRAFTED, InvalidField, Request, SparseDistribution, Verdict

Result = TypeVar("Result", bound=Any)


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that a runner was built for.

    slots: sequences held at once. max_length: tokens of a sequence. max_draft: draft tokens of a verification. chunk:
    tokens of a prefill step. vocab_size: token ids, and the length of a row of logits.
    """

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
        if self.max_draft > MAX_DRAFTED:
            raise ValueError(f"speculation_length: {self.max_draft} is above {MAX_DRAFTED}, the most of a round")
        if self.max_draft >= self.max_length:
            raise ValueError(
                f"speculation_length: {self.max_draft} does not fit a sequence length of {self.max_length}"
            )


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Feeds `tokens` (at most a chunk) to `slot` at positions `start`, start+1, ...

    `adapter`: the number of the one that changes the model for this row (tandem/runners/capabilities.py); 0: none does.
    `prompt`: what kept prefixes are to know of it (tandem/engine/shared_steps.py); no runner reads it.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    adapter: int = 0
    prompt: Any = None


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """Feeds the last committed token at `position` and `draft` after it; the request's rule decides what is committed.

    `distributions`: what each draft token was drawn from, for the rejection rule; empty if each had probability 1.
    `processor` changes the logits that tokens are drawn from. `adapter`: as for PrefillRow. `copied`: the draft is a
    copy from the text; no runner reads it.
    """

    slot: int
    position: int
    last_token: int
    draft: tuple[int, ...]
    request: Request
    distributions: tuple[SparseDistribution, ...] = ()
    processor: Processor | None = None
    adapter: int = 0
    copied: bool = False

    @property
    def plain(self) -> bool:
        """Whether the verdict follows from the ids of the largest logits."""
        return self.drawn and self.request.sampling.greedy

    @property
    def drawn(self) -> bool:
        """Whether the verdict follows from seeded draws from raw logits, or from the largest of them."""
        return self.processor is None and _only_tokens(self.request) and not (self.draft and self.request.drafts_sample)


TAIL = 8  # committed tokens that a draft model can catch up on in its first step; if behind by more, it prefills


@dataclass(frozen=True, slots=True)
class ProposeRow:
    """Asks for `k` draft tokens after `tail`, the last committed tokens (1 to `TAIL` of them).

    `position` is the position of the last token of `tail`. A tail of several tokens feeds those that the draft model's
    cache lacks: two after a fully accepted draft, more after a draft copied by lookup. `target_vocab_size` is set if it
    is smaller than the draft's; the rejection rule then draws only ids below it.
    `processor` changes the logits that tokens are drawn from. `adapter`: as for PrefillRow, of the draft model's own.
    """

    slot: int
    position: int
    tail: tuple[int, ...]
    k: int
    request: Request
    target_vocab_size: int | None = None
    processor: Processor | None = None
    adapter: int = 0

    @property
    def plain(self) -> bool:
        """Whether the draft consists of the ids of the largest logits."""
        return self.drawn and self.request.sampling.greedy

    @property
    def drawn(self) -> bool:
        """Whether the draft consists of seeded draws from raw logits, or of the ids of the largest."""
        return self.processor is None and not self.request.drafts_sample


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens, the seconds they took, and the distributions they were drawn from if the verifier needs them."""

    token_ids: tuple[int, ...]
    seconds: float = 0.0
    distributions: tuple[SparseDistribution, ...] = ()

    def within(self, vocab_size: int) -> Proposal:
        """The proposal cut before the first token id that is not below `vocab_size`."""
        ids = known_prefix(self.token_ids, vocab_size)
        return Proposal(ids, self.seconds, self.distributions[: len(ids)])


@dataclass(frozen=True, slots=True)
class FusedRow:
    """Proposes and verifies in one step; draft and target use the same slot number.

    `copied`: a draft copied by lookup; the draft model then proposes nothing for this row. Request and processor of
    `propose` are those of the verification too. `adapter`: the target's; the draft's is that of `propose`.
    """

    propose: ProposeRow
    copied: tuple[int, ...] = ()
    adapter: int = 0

    @property
    def plain(self) -> bool:
        """Whether the round follows from the ids of the largest logits of both models."""
        return self.drawn and self.propose.plain

    @property
    def drawn(self) -> bool:
        """Whether the round follows from seeded draws from raw logits, or from the largest of them."""
        return self.propose.drawn and _only_tokens(self.propose.request)


def _only_tokens(request: Request) -> bool:
    """Whether a verdict holds tokens alone."""
    return not request.margins and request.logprobs is None


@dataclass(frozen=True, slots=True)
class FusedResult:
    """A row's proposal and the target's verdict on it.

    `draft_seconds`: time that the proposals of all rows took together. `draft_failed`: why the draft model proposed
    nothing, or empty if it did not fail.
    """

    proposal: Proposal
    verdict: Verdict
    draft_seconds: float = 0.0
    draft_failed: str = ""


@dataclass(frozen=True, slots=True)
class StepShapes:
    """The step shapes in use. `bit_exact`: all gave bit-identical logits for the same token on this device.

    widths: tokens per row. batches: rows per step. lengths: cache positions that attention reads (empty: always all).
    chunks: tokens of a prefill step. prefill_lengths: cache positions that a prefill step reads. note: why bits could
    not be compared, if so. ragged: the rows of a step may differ in width, and nothing is padded.
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
        """Number of tokens in a step of rows of these widths, including padding."""
        if self.ragged:
            return sum(widths)
        rows, widest = len(widths), max(widths)
        padded = min((b for b in self.batches if b >= rows), default=rows)
        return padded * min((w for w in self.widths if w >= widest), default=widest)

    def width(self, needed: int) -> int:
        """The narrowest width that holds `needed` tokens. Raises StopIteration if none does."""
        return next(w for w in self.widths if w >= needed)

    def batch(self, rows: int) -> int:
        """The smallest batch that holds `rows` rows. Raises StopIteration if none does."""
        return next(b for b in self.batches if b >= rows)

    def length(self, end: int) -> int | None:
        """Cache positions to read for tokens before position `end`; None means the whole cache."""
        return next((n for n in self.lengths if n >= end), None)

    def prefill_length(self, end: int) -> int | None:
        """Like `length`, for a prefill step."""
        return next((n for n in self.prefill_lengths if n >= end), None)

    def chunk(self, tokens: int) -> int:
        """The smallest prefill chunk that holds `tokens` tokens. Raises StopIteration if none does."""
        return next(c for c in self.chunks if c >= tokens)

    @property
    def count(self) -> int:
        """Number of shapes that a verification can take."""
        return len(self.widths) * len(self.batches) * (len(self.lengths) + 1)


@dataclass(frozen=True, slots=True)
class RunnerIdentity:
    """Describes a runner's model for GetModelInfo."""

    model_name: str
    weights_revision: str
    dtype: str
    device: str
    backend: str
    end_of_sequence_ids: tuple[int, ...] = field(default=())
    rehearsal: Rehearsal | None = None  # if its steps take the times of another device


class RowFailed(RuntimeError):
    """One row of a step failed while the others succeeded. Its slot must be prefilled again from position 0."""


class StructureEnded(InvalidField, RowFailed):
    """The row's structure cannot be followed any further, which is the request's fault."""


class Runner(Protocol):
    """The steps that every backend provides.

    A step takes rows of different slots, at most `limits.slots` of them, and returns one result per row, in order. A
    row that fails gets a RowFailed, returned rather than raised, and does not affect the others. A step raises only if
    it failed as a whole (the device is gone, memory is exhausted); the caches of its rows are then undefined.
    """

    @property
    def limits(self) -> Limits:
        """The sizes that the runner was built for; they never change."""

    @property
    def identity(self) -> RunnerIdentity:
        """The model, its weights, and the device that runs it."""

    @property
    def shapes(self) -> StepShapes:
        """The step shapes in use; final once `warm_up` has returned."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beyond these steps, and its traits (see tandem/engine/compatibility.py)."""

    def warm_up(self, startup: Startup | None = None) -> None:
        """Compiles and runs every step once, checks batch invariance and sets `shapes`.

        Call it once, before any step; it overwrites every slot. `startup` records how long each stage takes. Raises
        RuntimeError or ValueError if the steps cannot be compiled or run.
        """

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        """Writes the rows' tokens to their slots' caches. Returns None for each row that succeeded.

        Each row has 1 to `limits.chunk` tokens, and its `start` is not beyond what its slot holds.
        """

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        """Feeds last tokens and drafts to the model; returns what it commits in each row.

        Each draft has 0 to `limits.max_draft` tokens; one without tokens is plain decoding. A verdict commits the
        accepted draft tokens and one more, drawn by the row's seeded sampling rule. A row whose logits are not finite
        gets RowFailed. The cache then holds the last token and the accepted part of the draft.
        """

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        """Draws up to `row.k` draft tokens for each row, one after another, and caches all but the last drawn.

        The proposals of a call share its duration as their `seconds`. Under the rejection rule a sampled proposal has
        one distribution per token.
        """

    def fused_with(self, draft: Runner) -> FusedStep | None:
        """A step that drafts with `draft` and verifies in one call, or None if there is none for this pair."""


FusedStep = Callable[[Sequence[FusedRow]], list[FusedResult | RowFailed]]


def verify_row(
    row: VerifyRow,
    logits: Callable[[int], Logits],
    logprobs_of: LogprobsOf = all_logprobs,
    best: Callable[[int], int] | None = None,
) -> Verdict:
    """Applies the row's rule. `logits(i)`: the target's logits, float32 [vocabulary], after row.draft[:i].

    `best`: as for verify_draft. Raises BadLogits.
    """
    return verify_draft(
        row.draft, row.distributions, logits, row.request, row.position + 1, row.processor, logprobs_of, best
    )


def draft_next(row: ProposeRow, logits: Logits, drafted: Sequence[int]) -> tuple[int, SparseDistribution | None]:
    """Draws the row's next draft token after `drafted` from the draft's logits, float32 [vocabulary]."""
    position = row.position + 1 + len(drafted)
    return draft_token(logits, row.request, position, row.target_vocab_size, row.processor, drafted)


def verdict_or_failure(verdict: Callable[[], Verdict]) -> Verdict | RowFailed:
    """The verdict, or RowFailed if the row's logits are not finite or its structure cannot be followed."""
    try:
        return verdict()
    except StructureFailed as error:
        return StructureEnded("structure", str(error))
    except BadLogits as error:
        return RowFailed(f"target logits: {error}")


def sized(results: list[Result], shapes: StepShapes, widths: Sequence[int]) -> list[Result]:
    """The results of one step, whose verdicts now report its size: that of rows of these widths."""
    rows, widest, tokens = len(widths), max(widths), shapes.step_tokens(widths)
    for result in results:
        verdict = result.verdict if isinstance(result, FusedResult) else result
        if isinstance(verdict, Verdict):
            verdict.rows, verdict.width, verdict.step_tokens = rows, widest, tokens
    return results


def verify_sized(target: Runner, rows: Sequence[Any]) -> list[Any]:
    """Verifies the rows, and feeds the chunks after them; each verdict also reports the size of the step."""
    widths = [len(row.tokens) if isinstance(row, PrefillRow) else 1 + len(row.draft) for row in rows]
    return sized(target.verify(rows), target.shapes, widths)

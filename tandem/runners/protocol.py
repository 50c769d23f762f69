"""The Runner protocol: prefill, verify and propose, each over rows at different positions.

A runner owns one model and its slot cache; only the device thread calls it. Positions are absolute and count from 0. A
step may start at any position up to the end of a slot's valid cache and overwrites all beyond, so rollback is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from tandem.runners.capabilities import Capabilities
from tandem.runners.startup import Startup
from tandem.speculation.draws import BadLogits, StructureFailed
from tandem.speculation.processing import Processor
from tandem.speculation.rejection import Logits
from tandem.speculation.rules import LogprobsOf, all_logprobs, draft_token, known_prefix, verify_draft
from tandem.speculation.types import MAX_DRAFTED, InvalidField, Rehearsal, Request, SparseDistribution, Verdict

Result = TypeVar("Result", bound=Any)


@dataclass(frozen=True, slots=True)
class Limits:
    """slots: concurrent sequences. max_length, max_draft, chunk: tokens per sequence, draft, prefill step."""

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
    """Feeds `tokens` (at most a chunk) to `slot` at positions `start`, start+1, ...; in shared steps, then `then`."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    adapter: int = 0  # LoRA adapter number; 0: none
    prompt: Any = None  # for the prefix cache, not for runners
    then: VerifyRow | None = None  # from the position behind; its verdict, or None if it fails, is the row's result

    @property
    def fed(self) -> tuple[int, ...]:
        return (*self.tokens, *self.then.fed) if self.then else self.tokens


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """Feeds the last committed token at `position`, then `draft`; the request's rule decides what is committed."""

    slot: int
    position: int
    last_token: int
    draft: tuple[int, ...]
    request: Request
    distributions: tuple[SparseDistribution, ...] = ()  # per draft token, for the rejection rule; empty: probability 1
    processor: Processor | None = None  # changes the logits
    adapter: int = 0
    copied: bool = False  # a lookup draft; not for runners

    @property
    def fed(self) -> tuple[int, ...]:
        return (self.last_token, *self.draft)

    @property
    def plain(self) -> bool:
        """Whether the verdict needs only argmax ids."""
        return self.drawn and self.request.sampling.greedy

    @property
    def drawn(self) -> bool:
        """Whether the verdict needs only argmax ids or seeded draws from raw logits."""
        return self.processor is None and _only_tokens(self.request) and not (self.draft and self.request.drafts_sample)


TAIL = 8  # committed tokens that a draft model can catch up on in its first step; if behind by more, it prefills
CHUNKS_AT_ONCE = 4  # whole chunks' tokens of several prompts in a shared step, at most


@dataclass(frozen=True, slots=True)
class ProposeRow:
    """Requests `k` draft tokens after `tail`, which ends at `position`."""

    slot: int
    position: int
    tail: tuple[int, ...]  # all that the cache lacks: up to `TAIL` tokens, or a chunk in shared steps
    k: int
    request: Request
    target_vocab_size: int | None = None  # if below the draft's: limit for the rejection rule
    processor: Processor | None = None  # changes the logits
    adapter: int = 0  # the draft model's
    least: float = 0.0  # a runner may end the draft behind the token where its probability falls below

    @property
    def plain(self) -> bool:
        """Whether the draft needs only argmax ids."""
        return self.drawn and self.request.sampling.greedy

    @property
    def drawn(self) -> bool:
        """Whether the draft needs only argmax ids or seeded draws from raw logits."""
        return self.processor is None and not self.request.drafts_sample


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens, their seconds, and their distributions if the verifier needs them."""

    token_ids: tuple[int, ...]
    seconds: float = 0.0
    distributions: tuple[SparseDistribution, ...] = ()
    doubted: bool = False  # ended by the row's `least`

    def within(self, vocab_size: int) -> Proposal:
        """Cuts the proposal before the first id >= `vocab_size`."""
        ids = known_prefix(self.token_ids, vocab_size)
        return replace(self, token_ids=ids, distributions=self.distributions[: len(ids)])


@dataclass(frozen=True, slots=True)
class FusedRow:
    """Proposes and verifies in one step, in the same slot number of draft and target."""

    propose: ProposeRow
    copied: tuple[int, ...] = ()  # a lookup draft, verified instead of a proposal
    adapter: int = 0  # the target's
    # Probability by draft token, proposed or not, that it is committed; empty: all that are proposed are verified
    worth: tuple[float, ...] = ()

    def cut(self, length: int) -> FusedRow:
        """The row with at most `length` draft tokens."""
        if length >= max(self.propose.k, len(self.copied)):
            return self
        propose = replace(self.propose, k=min(self.propose.k, length))
        return replace(self, propose=propose, copied=self.copied[:length], worth=self.worth[:length])

    @property
    def plain(self) -> bool:
        """Whether the round needs only argmax ids of both models."""
        return self.drawn and self.propose.plain

    @property
    def drawn(self) -> bool:
        """Whether the round needs only argmax ids or seeded draws from raw logits."""
        return self.propose.drawn and _only_tokens(self.propose.request)


def _only_tokens(request: Request) -> bool:
    return not request.margins and request.logprobs is None


@dataclass(frozen=True, slots=True)
class FusedResult:
    """`draft_seconds`: of all rows' proposals together. `draft_failed`: why the draft model failed, or empty."""

    proposal: Proposal
    verdict: Verdict
    draft_seconds: float = 0.0
    draft_failed: str = ""


@dataclass(frozen=True, slots=True)
class StepShapes:
    """The step shapes in use."""

    widths: tuple[int, ...]  # tokens per row
    batches: tuple[int, ...]  # rows per step
    bit_exact: bool  # all gave bit-identical logits for a token on this device
    lengths: tuple[int, ...] = ()  # cache positions that attention reads; empty: all
    chunks: tuple[int, ...] = ()  # tokens of a prefill step
    prefill_lengths: tuple[int, ...] = ()  # lengths of prefill steps
    note: str = ""  # why bits could not be compared
    ragged: bool = False  # no padding
    drafts: tuple[int, ...] = ()  # draft tokens of a graph

    def step_tokens(self, widths: Sequence[int]) -> int:
        """Tokens of a step with rows of these widths, padding included."""
        if self.ragged:
            return sum(widths)
        rows, widest = len(widths), max(widths)
        padded = min((b for b in self.batches if b >= rows), default=rows)
        return padded * min((w for w in self.widths if w >= widest), default=widest)

    def width(self, needed: int) -> int:
        """The narrowest width of at least `needed`. Raises StopIteration."""
        return next(w for w in self.widths if w >= needed)

    def batch(self, rows: int) -> int:
        """The smallest batch of at least `rows`. Raises StopIteration."""
        return next(b for b in self.batches if b >= rows)

    def length(self, end: int) -> int | None:
        """Cache positions to read for tokens before position `end`; None: all."""
        return next((n for n in self.lengths if n >= end), None)

    def prefill_length(self, end: int) -> int | None:
        """Like `length`, for a prefill step."""
        return next((n for n in self.prefill_lengths if n >= end), None)

    def draft(self, k: int) -> int:
        """The shortest draft of a graph of at least `k`. Raises StopIteration."""
        return next(d for d in self.drafts if d >= k)

    def chunk(self, tokens: int) -> int:
        """The smallest prefill chunk of at least `tokens`. Raises StopIteration."""
        return next(c for c in self.chunks if c >= tokens)

    @property
    def count(self) -> int:
        return len(self.widths) * len(self.batches) * (len(self.lengths) + 1)


@dataclass(frozen=True, slots=True)
class RunnerIdentity:
    """A runner's model, for GetModelInfo."""

    model_name: str
    weights_revision: str
    dtype: str
    device: str
    backend: str
    end_of_sequence_ids: tuple[int, ...] = field(default=())
    rehearsal: Rehearsal | None = None  # if its steps take the times of another device


class RowFailed(RuntimeError):
    """A row of a step failed while others succeeded; prefill its slot again from position 0."""


class StructureEnded(InvalidField, RowFailed):
    """The row's structure allows no further token: the request's fault."""


class Runner(Protocol):
    """The steps that every backend provides.

    A step takes at most `limits.slots` rows of different slots and returns one result per row, in order; a failed row
    returns a RowFailed. A step that fails as a whole raises; its rows' caches are then undefined.
    """

    @property
    def limits(self) -> Limits:
        """Constant."""

    @property
    def identity(self) -> RunnerIdentity:
        """The model, its weights and its device."""

    @property
    def shapes(self) -> StepShapes:
        """The step shapes in use; final after `warm_up`."""

    @property
    def capabilities(self) -> Capabilities:
        """Abilities beyond these steps, and traits."""

    def warm_up(self, startup: Startup | None = None) -> None:
        """Compiles and runs every step once, checks batch invariance, sets `shapes`; call it once, before any step.

        Overwrites every slot. Raises RuntimeError or ValueError if the steps cannot be compiled or run.
        """

    def prefill(self, rows: Sequence[PrefillRow]) -> list[RowFailed | None]:
        """Writes rows of 1 to `limits.chunk` tokens from positions no later than their slots' valid ends."""

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        """Feeds last tokens and drafts (0 to `limits.max_draft` tokens); returns what each row commits.

        A verdict commits the accepted draft tokens and one drawn token; the cache then holds all but the drawn one. A
        row with logits that are not finite gets RowFailed.
        """

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | RowFailed]:
        """Draws up to `row.k` draft tokens per row and caches all but the last.

        `seconds` is the whole call's. Sampled proposals under the rejection rule have a distribution per token.
        """

    def fused_with(self, draft: Runner) -> FusedStep | None:
        """A step that drafts with `draft` and verifies in one call; None if this pair has none."""


FusedStep = Callable[[Sequence[FusedRow]], list[FusedResult | RowFailed]]


def verify_row(
    row: VerifyRow,
    logits: Callable[[int], Logits],
    logprobs_of: LogprobsOf = all_logprobs,
    best: Callable[[int], int] | None = None,
) -> Verdict:
    """Applies the row's rule. `logits(i)`: float32 [vocabulary] after row.draft[:i]. Raises BadLogits."""
    return verify_draft(
        row.draft, row.distributions, logits, row.request, row.position + 1, row.processor, logprobs_of, best
    )


def draft_next(row: ProposeRow, logits: Logits, drafted: Sequence[int]) -> tuple[int, SparseDistribution | None]:
    """Draws the next draft token after `drafted` from the draft's logits, float32 [vocabulary]."""
    position = row.position + 1 + len(drafted)
    return draft_token(logits, row.request, position, row.target_vocab_size, row.processor, drafted)


def verdict_or_failure(verdict: Callable[[], Verdict]) -> Verdict | RowFailed:
    """The verdict, or RowFailed for logits that are not finite or a structure that has ended."""
    try:
        return verdict()
    except StructureFailed as error:
        return StructureEnded("structure", str(error))
    except BadLogits as error:
        return RowFailed(f"target logits: {error}")


def sized(results: list[Result], shapes: StepShapes, widths: Sequence[int]) -> list[Result]:
    """The results with the step's size: that of rows of these widths."""
    rows, widest, tokens = len(widths), max(widths), shapes.step_tokens(widths)
    for result in results:
        verdict = result.verdict if isinstance(result, FusedResult) else result
        if isinstance(verdict, Verdict):
            verdict.rows, verdict.width, verdict.step_tokens = rows, widest, tokens
    return results


def verify_sized(target: Runner, rows: Sequence[Any]) -> list[Any]:
    """Verifies rows and the chunks after them; verdicts report the step's size."""
    return sized(target.verify(rows), target.shapes, [len(row.fed) for row in rows])

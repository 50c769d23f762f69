"""Defines the data types of a generation: request, drafts, verdicts, chunks and statistics.

The types are independent of any wire format.
"""

from __future__ import annotations

import enum
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.speculation.model_info import ModelInfo as ModelInfo
from tandem.speculation.request import MAX_LOGPROBS as MAX_LOGPROBS
from tandem.speculation.request import GenerationRequest as GenerationRequest
from tandem.speculation.request import Request as Request
from tandem.speculation.request import Rule as Rule
from tandem.speculation.request import TooLong as TooLong
from tandem.speculation.sampling import SAMPLING_FIELDS as SAMPLING_FIELDS
from tandem.speculation.sampling import InvalidField as InvalidField
from tandem.speculation.sampling import SamplingParams as SamplingParams
from tandem.speculation.sampling import Structure as Structure
from tandem.speculation.sampling import StructureKind as StructureKind

MAX_DRAFTED = 256
"""The most draft tokens that a message brings and a run holds."""


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """The distribution that a draft token was drawn from: ascending ids, each with a 32-bit float weight above 0.

    This is exactly what crosses the wire, so the drafter and the verifier compute with the same numbers.
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidField("token_ids", "empty: a distribution has at least one token")
        if len(self.weights) != len(self.token_ids):
            raise InvalidField("weights", f"{len(self.weights)} for {len(self.token_ids)} token ids")
        for before, after in itertools.pairwise(self.token_ids):
            if before >= after:
                raise InvalidField("token_ids", f"{after} follows {before}: not ascending")
        for weight in self.weights:
            if not (math.isfinite(weight) and weight > 0):
                raise InvalidField("weights", f"{weight} is not a finite number above 0")
        sent = f"<{len(self.weights)}f"
        if struct.unpack(sent, struct.pack(sent, *self.weights)) != self.weights:
            raise InvalidField("weights", "not all of them are 32-bit floats")


class FinishReason(enum.Enum):
    """Why a generation ended. The values are those of the wire format."""

    END_OF_SEQUENCE = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    LENGTH = 4


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token, and of the likeliest tokens in its place, as (token id, log-probability).

    They are the target's own: log-softmax of its raw logits, before temperature, penalties, biases and structure, in
    64-bit arithmetic. `top` is sorted by value, then by id.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Proposer(enum.Enum):
    """What proposed a draft token. The values are used in reports and on the wire."""

    NGRAM = "ngram"
    MODEL = "model"


@dataclass(slots=True)
class Verdict:
    """The result of one verification: `accepted` draft tokens, then one token drawn by the target.

    It is not copied on its way: the step that makes it notes its size, and the sequence its seconds, once. They are
    measured next to the target; so is when its step `ended` (perf_counter; of a step elsewhere: when it was read, or
    0). `margins` (in logits, 0 is a tie) are filled in only on request, and never under the rejection rule, which
    compares no scores; `logprobs` on request, one per token. `rows` rows shared the step; the widest had `width` tokens
    (0: unknown, taken to be this row's), and all of them together `step_tokens` (0: unknown, taken to be rows * width).
    `features`, on request: those of the last token that was fed before and of the accepted tokens, as bytes (see
    features.py).
    """

    token_ids: tuple[int, ...]
    accepted: int
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    margins: tuple[float, ...] = ()
    rows: int = 1
    width: int = 0
    step_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    features: bytes = b""
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, the proposer of each, and the seconds they took in steps shared by `rows` rows.

    Under the rejection rule `distributions` holds the distribution that each token was drawn from; if it is empty, each
    token was proposed with probability 1. `ahead`: the round did not wait for it.
    """

    token_ids: tuple[int, ...] = ()
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    proposed_by: tuple[Proposer, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()
    rows: int = 1
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.distributions and len(self.distributions) != len(self.token_ids):
            raise ValueError(f"distributions: {len(self.distributions)} for {len(self.token_ids)} tokens")
        if self.proposed_by and len(self.proposed_by) != len(self.token_ids):
            raise ValueError(f"proposed_by: {len(self.proposed_by)} entries for {len(self.token_ids)} tokens")


def model_part(k: int, model_k: int | None) -> int:
    """Returns how many of `k` draft tokens a model may propose; all of them if `model_k` is None."""
    return k if model_k is None else min(k, model_k)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens committed together, and the text that they complete. `logprobs`: one per token, if asked for."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    margins: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __add__(self, after: Chunk) -> Chunk:
        return Chunk(
            self.token_ids + after.token_ids,
            self.text + after.text,
            self.margins + after.margins,
            self.logprobs + after.logprobs,
        )


@dataclass(slots=True)
class SpeculationStats:
    """Statistics of one request, defined in generation.proto. Times are in seconds, bytes are of protobuf payload.

    `placement`: where the models ran, if not as the server's role says ("apart" for a fused pair's); known there alone,
    like `verifiers`: receipt key, arithmetic and adapter revision of each verifier elsewhere, in turn.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    queue_seconds: float = 0.0
    network_seconds: float = 0.0
    prefill_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    stale_rounds: int = 0
    stale_drafts: int = 0
    sent_by_depth: list[int] = field(default_factory=list)
    guessed_rounds: int = 0
    undrafted_rounds: int = 0
    placement: str = ""
    run_steps: int = 0
    wasted_steps: int = 0
    cached_prompt_tokens: int = 0
    feature_bytes: int = 0
    verifiers: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def wasted_drafts(self) -> int:
        return self.drafted - self.accepted + self.stale_drafts

    @property
    def mean_in_flight(self) -> float | None:
        """The mean number of rounds in flight when a round was sent, counting that round."""
        sent = sum(self.sent_by_depth)
        return sum((i + 1) * n for i, n in enumerate(self.sent_by_depth)) / sent if sent else None

    @property
    def max_in_flight(self) -> int:
        return len(self.sent_by_depth)

    def sent(self, others: int) -> None:
        """Counts a round that was sent while `others` others were in flight."""
        self.sent_by_depth += [0] * (others + 1 - len(self.sent_by_depth))
        self.sent_by_depth[others] += 1

    def stale(self, draft: Draft, drafted_bonus: bool = True) -> None:
        """Counts a round that was sent ahead and committed nothing; `drafted_bonus`: it began with a bonus token."""
        self.stale_rounds += 1
        self.stale_drafts += len(draft.token_ids) + drafted_bonus
        self.spent(draft)

    def spent(self, draft: Draft) -> None:
        """Adds the seconds that a draft took."""
        self.draft_seconds += draft.compute_seconds
        self.queue_seconds += draft.queue_seconds

    @property
    def rounds_by_length(self) -> list[int]:
        """Entry n is the number of rounds that verified n draft tokens."""
        return rounds_by_length(self.rounds, self.drafted_per_position)

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Entry n is the number of rounds of which n draft tokens were accepted, up to the longest draft."""
        return tuple(rounds_by_length(self.rounds, self.accepted_per_position))

    def observe(self, drafted: Sequence[int], verdict: Verdict, proposed_by: Sequence[Proposer] = ()) -> None:
        """Counts a verified round, and its draft tokens by proposer as far as that is known."""
        self.rounds += 1
        self.drafted += len(drafted)
        self.accepted += verdict.accepted
        grow = len(drafted) - len(self.drafted_per_position)
        self.drafted_per_position += [0] * grow
        self.accepted_per_position += [0] * grow
        for i in range(len(drafted)):
            self.drafted_per_position[i] += 1
            self.accepted_per_position[i] += i < verdict.accepted
        self.verify_seconds += verdict.compute_seconds
        self.queue_seconds += verdict.queue_seconds
        for i, proposer in enumerate(proposed_by):
            name = proposer.value
            self.drafted_by[name] = self.drafted_by.get(name, 0) + 1
            self.accepted_by[name] = self.accepted_by.get(name, 0) + (i < verdict.accepted)


def rounds_by_length(rounds: int, drafted_per_position: Sequence[int]) -> list[int]:
    """Returns how many of the rounds had exactly 0, 1, 2, ... draft tokens, or accepted ones, by those of positions."""
    at_least = [rounds, *drafted_per_position]
    return [max(0, n - longer) for n, longer in itertools.zip_longest(at_least, at_least[1:], fillvalue=0)]


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """Ends the stream of a generation: why it stopped, token counts and statistics; a receipt's JSON if asked for."""

    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    stats: SpeculationStats
    receipt: str = ""

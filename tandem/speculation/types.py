"""Data types of a generation, independent of wire formats."""

from __future__ import annotations

import enum
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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

MAX_DRAFTED = 256  # draft tokens of a message, and of a run


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A draft token's distribution as sent: ascending ids, 32-bit float weights above 0."""

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
    """Why a generation ended. The values are the wire format's."""

    END_OF_SEQUENCE = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    LENGTH = 4


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-softmax of the target's raw logits, before warping, of a token and the `top` (id, value), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Proposer(enum.Enum):
    """What proposed a draft token. The values are used in reports and on the wire."""

    NGRAM = "ngram"
    MODEL = "model"


@dataclass(slots=True)
class Verdict:
    """One verification's result: `accepted` draft tokens, then one drawn by the target, whose seconds these are."""

    token_ids: tuple[int, ...]
    accepted: int
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    margins: tuple[float, ...] = ()  # logits, on request, under agreement
    rows: int = 1  # of the step
    width: int = 0  # tokens of the widest row; 0: this row's
    step_tokens: int = 0  # 0: rows * width
    logprobs: tuple[TokenLogprobs, ...] = ()
    features: bytes = b""  # of the last token fed before, and of the accepted ones
    ended: float = 0.0  # perf_counter; 0: unknown
    following: bool | None = None  # whether the next round has ended, which began by itself; None: it must be begun
    network_seconds: float | None = None  # not spent at the target, if measured
    drafted: int = 0  # draft tokens of a run's step
    copied: bool = False  # of a run's step: by the target, from the text
    with_prompt: bool = False  # in the step of the prompt's last part, which has its seconds


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens and the seconds of their steps."""

    token_ids: tuple[int, ...] = ()
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    proposed_by: tuple[Proposer, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()  # under rejection, per token; empty: probability 1
    rows: int = 1  # of the steps
    ahead: bool = False  # the round did not wait for it
    doubted: bool = False  # the model ended it, unsure of its tokens

    def __post_init__(self) -> None:
        if self.distributions and len(self.distributions) != len(self.token_ids):
            raise ValueError(f"distributions: {len(self.distributions)} for {len(self.token_ids)} tokens")
        if self.proposed_by and len(self.proposed_by) != len(self.token_ids):
            raise ValueError(f"proposed_by: {len(self.proposed_by)} entries for {len(self.token_ids)} tokens")


class LengthPlan(NamedTuple):
    """The most draft tokens of a round: copied, and of a model. `lasts`: the plan holds for later rounds too.

    `of_copies`, `of_model`: the probabilities that draft tokens are committed, by position; empty: lengths are fixed.
    `least`: a model's draft of a smaller probability ends, as another token is not worth its time; 0: none does.
    """

    copied: int
    model_k: int
    lasts: bool = True
    of_copies: tuple[float, ...] = ()
    of_model: tuple[float, ...] = ()
    least: float = 0.0

    @property
    def k(self) -> int:
        return max(self.copied, self.model_k)

    def within(self, most: int) -> LengthPlan:
        return self._replace(copied=min(self.copied, most), model_k=min(self.model_k, most))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens committed together, and the text that they complete. `rounds`: tokens of each round."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    margins: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: tuple[int, ...] = ()

    def __add__(self, after: Chunk) -> Chunk:
        return Chunk(
            self.token_ids + after.token_ids,
            self.text + after.text,
            self.margins + after.margins,
            self.logprobs + after.logprobs,
            self.rounds + after.rounds,
        )


@dataclass(slots=True)
class SpeculationStats:
    """Statistics of one request, defined in generation.proto. Bytes are protobuf payload."""

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
    placement: str = ""  # if not as the server's role says
    run_steps: int = 0
    wasted_steps: int = 0
    cached_prompt_tokens: int = 0
    feature_bytes: int = 0
    verifiers: list[tuple[str, str, str]] = field(default_factory=list)  # receipt key, arithmetic, adapter revision

    @property
    def wasted_drafts(self) -> int:
        return self.drafted - self.accepted + self.stale_drafts

    @property
    def mean_in_flight(self) -> float | None:
        """The mean number of rounds in flight when one was sent, that one included."""
        sent = sum(self.sent_by_depth)
        return sum((i + 1) * n for i, n in enumerate(self.sent_by_depth)) / sent if sent else None

    @property
    def max_in_flight(self) -> int:
        return len(self.sent_by_depth)

    def sent(self, others: int) -> None:
        self.sent_by_depth += [0] * (others + 1 - len(self.sent_by_depth))
        self.sent_by_depth[others] += 1

    def stale(self, draft: Draft, drafted_bonus: bool = True) -> None:
        """Counts a round sent ahead that committed nothing."""
        self.stale_rounds += 1
        self.stale_drafts += len(draft.token_ids) + drafted_bonus
        self.spent(draft)

    def spent(self, draft: Draft) -> None:
        self.draft_seconds += draft.compute_seconds
        self.queue_seconds += draft.queue_seconds

    @property
    def rounds_by_length(self) -> list[int]:
        """Entry n: rounds that verified n draft tokens."""
        return rounds_by_length(self.rounds, self.drafted_per_position)

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Entry n: rounds that accepted n draft tokens."""
        return tuple(rounds_by_length(self.rounds, self.accepted_per_position))

    def observe(self, drafted: Sequence[int], verdict: Verdict, proposed_by: Sequence[Proposer] = ()) -> None:
        self.rounds += not verdict.with_prompt  # else verify_seconds lack its time
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
    """Returns the rounds with exactly 0, 1, 2, ... draft (or accepted) tokens."""
    at_least = [rounds, *drafted_per_position]
    return [max(0, n - longer) for n, longer in itertools.zip_longest(at_least, at_least[1:], fillvalue=0)]


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """The end of a generation: why, counts, statistics, and the receipt's JSON."""

    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    stats: SpeculationStats
    receipt: str = ""


@dataclass(slots=True)
class Rehearsal:
    """A model whose steps take the times of another device, and the steps that were slower than that."""

    part: str  # target or draft
    name: str
    device: str
    source: str
    steps: int = 0
    late_steps: int = 0
    late_seconds: float = 0.0  # in all


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A server's model; proto/tandem/v1/generation.proto defines the fields."""

    model_name: str
    weights_revision: str
    tokenizer_sha256: str
    vocab_size: int
    max_sequence_length: int
    max_speculation_length: int
    kv_slots: int
    dtype: str
    device: str
    backend: str
    draft_name: str = ""
    default_speculation_length: int = 0
    plain_width: int = 1
    bit_exact: bool = True
    startup_seconds: float = 0.0
    end_of_sequence_ids: tuple[int, ...] = ()
    adaptive_speculation_length: bool = False
    adapters: tuple[tuple[str, str], ...] = ()  # name, revision
    feature_layers: tuple[int, ...] = ()
    feature_size: int = 0
    rehearsals: tuple[Rehearsal, ...] = ()
    arithmetic: str = ""  # decides bits besides weights and number format
    receipt_key: str = ""
    max_unread_tokens: int = 0


_BLOCK = 512  # slices of this size are compared: a loop over tokens takes milliseconds of long texts


def common(left: Sequence[int], right: Sequence[int], start: int = 0) -> int:
    """Returns the length of the common prefix; positions below `start` agree."""
    if type(left) is not type(right):  # slices of a list and a tuple are never equal
        left, right = list(left), list(right)
    end = min(len(left), len(right))
    for at in range(min(start, end), end, _BLOCK):
        until = min(at + _BLOCK, end)
        if left[at:until] != right[at:until]:
            return next(i for i in range(at, until) if left[i] != right[i])
    return end

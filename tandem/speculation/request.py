"""A request: one frozen value from the entry on. Rows, sessions and remote verifiers read their options from it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from tandem.speculation.chat import ChatMessage, check_chat
from tandem.speculation.errors import TooLong as TooLong
from tandem.speculation.sampling import InvalidField, SamplingParams, member_named

if TYPE_CHECKING:
    from tandem.speculation.features import FeatureSpec  # which imports numpy

MAX_LOGPROBS = 20


class Rule(enum.Enum):
    """How drafts are verified. The values are used on the command line and in reports."""

    AGREEMENT = "agreement"
    REJECTION = "rejection"


class Drafts(enum.Enum):
    """Which drafter serves a request."""

    AUTO = "auto"
    NONE = "none"
    LOOKUP = "lookup"
    MODEL = "model"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Request:
    """A request without its prompt and stop conditions. Unset lengths and limits take the server's defaults."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    rule: Rule = Rule.AGREEMENT
    margins: bool = False  # report each token's margin to the runner-up
    logprobs: int | None = None
    adapter: str = ""  # the target's LoRA adapter
    features: FeatureSpec | None = None
    drafts: Drafts = Drafts.AUTO  # NONE is a speculation_length of 0
    speculation_length: int | None = None
    max_new_tokens: int | None = None
    max_total_tokens: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InvalidField("max_new_tokens", f"{self.max_new_tokens} is below 1")
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise InvalidField("max_total_tokens", f"{self.max_total_tokens} is below 2")
        if self.speculation_length is not None and self.speculation_length < 0:
            raise InvalidField("speculation_length", f"{self.speculation_length} is below 0")
        if self.drafts is Drafts.NONE:
            if self.speculation_length:
                raise InvalidField("drafts", f"none, but speculation_length is {self.speculation_length}")
            object.__setattr__(self, "speculation_length", 0)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidField("logprobs", f"{self.logprobs} is outside 0 to {MAX_LOGPROBS}")

    @property
    def models_draft(self) -> bool:
        """Whether a draft model may draft; if not, it needs no slot of one and no features."""
        return self.speculation_length != 0 and self.drafts not in (Drafts.NONE, Drafts.LOOKUP)

    @property
    def drafts_sample(self) -> bool:
        """Whether the verifier needs the distributions that drafts are drawn from."""
        return self.rule is Rule.REJECTION and not self.sampling.greedy

    def most_tokens(self, prompt_length: int) -> int | None:
        """Returns the most tokens of a sequence with such a prompt; None: unbounded."""
        with_new = None if self.max_new_tokens is None else prompt_length + self.max_new_tokens
        return min((most for most in (with_new, self.max_total_tokens) if most is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Request):
    """A request for one continuation, of exactly one of `text`, `token_ids` and `messages` (a chat)."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    chat: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_end_of_sequence: bool = False
    unset_sampling: frozenset[str] = frozenset()  # fields that take the server's defaults, unsent
    receipt: bool = False
    prediction: str = ""  # text like the output, the only drafter
    predicted: tuple[int, ...] = ()  # its tokens, set where it is tokenized

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        if (self.text is not None) + (self.token_ids is not None) + (self.messages is not None) != 1:
            raise InvalidField("prompt", "give exactly one of text, token_ids and messages")
        if self.messages is not None:
            check_chat(self.messages, self.chat)
        if any(not s for s in self.stop_strings):
            raise InvalidField("stop_strings", "an empty string would end every generation")
        if self.prediction and not self.takes_prediction:
            raise InvalidField("prediction", "it drafts: drafts must be auto or lookup, and speculation_length not 0")
        if self.receipt and self.rule is Rule.REJECTION:
            raise InvalidField("receipt", "under rejection tokens depend on drafts, which it has not: use agreement")

    @property
    def takes_prediction(self) -> bool:
        return self.speculation_length != 0 and self.drafts in (Drafts.AUTO, Drafts.LOOKUP)

    @property
    def of_models(self) -> Request:
        """The part that rows hold, kept small: rows may go to other processes each step."""
        return Request(**{each.name: getattr(self, each.name) for each in fields(Request)})


class RequestOptions(TypedDict, total=False):
    """Options in Python: type, rule for values, meaning. Enumerations are given by value."""

    max_new_tokens: Annotated[
        int | None,
        "a positive integer, or None",
        "tokens to produce at most, 1 or more. None: the server's default, else what the sequence length leaves.",
    ]
    chat: Annotated[
        bool, "True or False", "whether to put the text into the model's chat template, as a message of the user."
    ]
    messages: Annotated[
        Sequence[Mapping[str, Any]] | None,
        'a list of dictionaries with "role" and "content", or None',
        'a chat instead of a prompt: dictionaries with "role" (system, developer, user, assistant, tool) and "content" '
        'for the model\'s template; of an assistant also "tool_calls", of a tool "tool_call_id", as OpenAI has them. '
        "The answer is the assistant's next message.",
    ]
    ignore_end_of_sequence: Annotated[bool, "True or False", "whether to go on past the model's end-of-sequence token."]
    speculation_length: Annotated[
        int | None,
        "an integer from 0 on, or None",
        "draft tokens per round, 0 or more; 0 is plain decoding. None: the server decides.",
    ]
    rule: Annotated[
        str,
        '"agreement" or "rejection"',
        'how drafts are verified, "agreement" or "rejection". The tokens of the former do not depend on drafts.',
    ]
    logprobs: Annotated[
        int | None,
        "an integer from 0 to 20, or None",
        "report the log-probability of every token, and of so many likeliest ones in its place, 0 to 20. None: report "
        "none.",
    ]
    adapter: Annotated[
        str,
        "a string, the name of an adapter",
        'the name of a LoRA adapter of the server (ModelInfo.adapters). "": none.',
    ]
    drafts: Annotated[
        str,
        '"auto", "none", "lookup", "model" or "head"',
        'what drafts: "auto", "none", or of what the server has, "lookup", "model" or "head" alone.',
    ]
    prediction: Annotated[
        str,
        "a string",
        'a text that the output may be for the most part, as a file to change: it drafts, without changing tokens. "": '
        "none.",
    ]
    receipt: Annotated[
        bool, "True or False", "whether the completion has a signed receipt, which others can check (docs/receipts.md)."
    ]


_ENUMERATIONS: Mapping[str, type[enum.Enum]] = {"rule": Rule, "drafts": Drafts}


def members(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member_named(kind, name, options[name]) for name, kind in _ENUMERATIONS.items() if name in options}

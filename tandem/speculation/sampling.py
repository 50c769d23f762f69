"""How tokens are drawn: warping, seed, penalties, biases, structure."""

from __future__ import annotations

import enum
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

from tandem.speculation.errors import InvalidField as InvalidField
from tandem.speculation.errors import WrongType

Member = TypeVar("Member", bound=enum.Enum)

MAX_BIASES = 1024
LEAST_REPETITION_PENALTY = 0.01  # far lower ones overflow 32-bit logits
LONGEST_STRUCTURE = 65536  # characters


def member_named(kind: type[Member], field: str, name: str) -> Member:
    """Returns the enumeration's member of value `name`. Raises InvalidField."""
    if name not in {member.value for member in kind}:
        raise InvalidField(field, f"{name!r} is not one of {', '.join(member.value for member in kind)}")
    return kind(name)


class StructureKind(enum.Enum):
    """A structure's language. The values are used in messages."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Structure:
    """What the whole output must match; it may end only at a match, with an end-of-sequence token.

    `text`: a JSON schema, a regex in Rust's syntax, a JSON list of strings, or a Lark grammar.
    """

    kind: StructureKind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, StructureKind):
            raise WrongType("kind", "a tandem.StructureKind", self.kind)
        if not isinstance(self.text, str):
            raise WrongType("text", "a string", self.text)
        if not self.text:
            raise InvalidField("structure", f"the {self.kind.value} is empty")
        if len(self.text) > LONGEST_STRUCTURE:
            raise InvalidField("structure", f"{len(self.text)} characters are above the limit of {LONGEST_STRUCTURE}")
        if self.kind is StructureKind.JSON_SCHEMA and not isinstance(self._json(), dict):
            raise InvalidField("structure", "the json_schema is not a JSON object")
        if self.kind is StructureKind.CHOICE:
            _ = self.choices

    @property
    def choices(self) -> tuple[str, ...]:
        choices = self._json()
        if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)):
            raise InvalidField("structure", "the choice is not a JSON list of strings that are not empty")
        return tuple(choices)

    def _json(self) -> object:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidField("structure", f"the {self.kind.value} is not JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), ascending
    presence_penalty: float = 0.0  # of output tokens, subtracted, as OpenAI's
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # of prompt and output, divides (below 0 multiplies), as in transformers
    structure: Structure | None = None

    def __post_init__(self) -> None:
        for names, kind, expected in _TYPES:
            for name in names:
                if not isinstance(value := getattr(self, name), kind) or isinstance(value, bool):
                    raise WrongType(name, expected, value)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidField("temperature", f"{self.temperature} is not a finite number >= 0")
        if self.top_k < 0:
            raise InvalidField("top_k", f"{self.top_k} is below 0")
        if not 0 < self.top_p <= 1:
            raise InvalidField("top_p", f"{self.top_p} is outside (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise InvalidField("min_p", f"{self.min_p} is outside [0, 1]")
        if not 0 <= self.seed < 2**64:
            raise InvalidField("seed", f"{self.seed} is outside [0, 2**64)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise InvalidField(name, f"{getattr(self, name)} is outside [-2, 2]")
        if not LEAST_REPETITION_PENALTY <= self.repetition_penalty <= 2:
            least = f"[{LEAST_REPETITION_PENALTY}, 2]"
            raise InvalidField("repetition_penalty", f"{self.repetition_penalty} is outside {least}")
        self._check_biases()

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidField("logit_bias", f"{len(self.logit_bias)} tokens are above the limit of {MAX_BIASES}")
        for pair in self.logit_bias:
            if not (isinstance(pair, Sequence) and list(map(isinstance, pair, (Integral, Real))) == [True, True]):
                raise WrongType("logit_bias", "pairs of token id and bias", pair)
        for token, bias in self.logit_bias:
            if token < 0:
                raise InvalidField("logit_bias", f"token id {token} is below 0")
            if not -100 <= bias <= 100:
                raise InvalidField("logit_bias", f"{bias} of token {token} is outside [-100, 100]")
        for (before, _), (after, _) in itertools.pairwise(self.logit_bias):
            if before >= after:
                raise InvalidField("logit_bias", f"token id {after} follows {before}: not ascending")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def processed(self) -> tuple[str, ...]:
        return tuple(name for name, plain in _PLAIN if getattr(self, name) != plain)


_TYPES: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("temperature", "top_p", "min_p"), Real, "a number"),
    (("presence_penalty", "frequency_penalty", "repetition_penalty"), Real, "a number"),
    (("top_k", "seed"), Integral, "an integer"),
    (("logit_bias",), Sequence, "pairs of token id and bias"),
    (("structure",), Structure | None, "a tandem.Structure, or None"),
)

# A server may have defaults of these.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty")

_PLAIN: tuple[tuple[str, object], ...] = (
    ("logit_bias", ()),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("structure", None),
)

"""Matches the module patterns of an adapter in a bounded number of steps.

They are regular expressions, and Python's `re` tries every way to match one: (a+)+ freezes the process. Here a pattern
is followed through a path from all places at once, so that no way is tried twice. Sets of places are numbers: bit i is
the place before character i. What can only be matched by trying (look-around, back-references) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar, Union

MOST_CHARACTERS = 512
"""Limit of the length of a pattern, and of a path."""
MOST_STEPS = 1 << 21
"""Limit of the steps of all patterns on all paths. One pattern per linear layer of Llama 405B takes half of them."""
_MOST_NESTED = 16
_ONE = re.compile(r"\.|\\[dwsDWS]|\[\^?\]?(?:[^\]\\\[]|\\.)*\]")
_PLAIN = re.compile(r"\\([^A-Za-z0-9])|([^\\.\[\](){}|*+?^$])")
_REPEATED = re.compile(r"(?:([*+?])|\{(\d{1,6})(,(\d{0,6}))?\})\??(?![*+?{])")

Value = TypeVar("Value")
Node = Union[str, "re.Pattern[str]", "_Edge", "_Repeat", list[list["Node"]]]
"""A node of a parsed pattern: literal characters, one character of a class, an anchor, a repeated node, or alternatives
(`a|b`): sequences of nodes, one of which must match."""


class _Edge(Enum):
    """An anchor."""

    BEGIN = "^"
    END = "$"


@dataclass(frozen=True, slots=True)
class _Repeat:
    """A repeated node (`*`, `+`, `?`, `{m,n}`). `most` is None if there is no upper limit."""

    node: Node
    least: int
    most: int | None


class ModulePatterns(Generic[Value]):
    """Values by pattern, such as ranks. As with PEFT, the first pattern that matches the end of a path counts."""

    def __init__(self, field: str, values: Mapping[str, Value]) -> None:
        """Raises ValueError that names the `field` and the pattern."""
        self._field = field
        self._values = [(_Parser(field, pattern).parsed(), value) for pattern, value in values.items()]
        self.steps = 0

    def of(self, path: str, default: Value) -> Value:
        """The value for a module's path. Raises ValueError if the patterns take too many steps."""
        if len(path) > MOST_CHARACTERS:
            raise ValueError(f"{self._field}: a path of {len(path)} characters, more than {MOST_CHARACTERS}")
        places = _Places(path)
        begins = 1 | places.after(".")  # PEFT's rule is re.match(rf"(.*\.)?({pattern})$", path)
        for pattern, value in self._values:
            if self._before(pattern, 1 << len(path), places) & begins:
                return value
        return default

    def _before(self, node: Node, at: int, places: _Places) -> int:
        """The places from which the node leads to one of the places `at`."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise ValueError(f"{self._field}: its patterns take more than {MOST_STEPS} steps to match")
        if isinstance(node, str):
            return (at & places.after(node)) >> len(node)
        if isinstance(node, re.Pattern):
            return (at & places.after_one(node)) >> 1
        if isinstance(node, _Edge):
            return at & (1 << len(places.path) if node is _Edge.END else 1)
        if isinstance(node, _Repeat):
            return self._before_repeated(node, at, places)
        found = 0
        for sequence in node:
            reached = at
            for part in reversed(sequence):
                reached = self._before(part, reached, places) if reached else 0
            found |= reached
        return found

    def _before_repeated(self, repeat: _Repeat, at: int, places: _Places) -> int:
        for _ in range(repeat.least):
            at = self._before(repeat.node, at, places)
        found, times = at, repeat.least
        while at and (repeat.most is None or times < repeat.most):
            at = self._before(repeat.node, at, places) & ~found  # a place that was reached before leads nowhere new
            found, times = found | at, times + 1
        return found


class _Places:
    """Finds the places in one path where given characters end, and keeps them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._after: dict[object, int] = {}

    def after(self, text: str) -> int:
        """The places after every occurrence of `text`."""
        if text not in self._after:
            ends = (end for end in range(len(text), len(self.path) + 1) if self.path.startswith(text, end - len(text)))
            self._after[text] = sum(1 << end for end in ends)
        return self._after[text]

    def after_one(self, kind: re.Pattern[str]) -> int:
        """The places after every character of a kind."""
        if kind not in self._after:
            self._after[kind] = sum(2 << at for at, character in enumerate(self.path) if kind.match(character))
        return self._after[kind]


class _Parser:
    """Parses one regular expression into nodes."""

    def __init__(self, field: str, pattern: str) -> None:
        self._field, self._pattern, self._at, self._nested = field, pattern, 0, 0
        if len(pattern) > MOST_CHARACTERS:
            raise self._refusal(f"longer than {MOST_CHARACTERS} characters")

    def parsed(self) -> Node:
        found = self._either()
        if self._at < len(self._pattern):
            raise self._refusal()
        return found

    def _either(self) -> list[list[Node]]:
        sequences = [self._sequence()]
        while self._took("|"):
            sequences.append(self._sequence())
        return sequences

    def _sequence(self) -> list[Node]:
        nodes: list[Node] = []
        joins = False  # whether the next characters continue those before
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            node = self._repeated(self._one())
            if joins and isinstance(node, str):
                nodes[-1] = f"{nodes[-1]}{node}"
            else:
                nodes.append(node)
            joins = isinstance(node, str)
        return nodes

    def _one(self) -> Node:
        for character in "^$":
            if self._took(character):
                return _Edge(character)
        if self._took("("):
            return self._group()
        if plain := _PLAIN.match(self._pattern, self._at):
            self._at = plain.end()
            return plain[1] or plain[2]
        one = _ONE.match(self._pattern, self._at)
        if one is None:
            raise self._refusal()
        self._at = one.end()
        try:
            return re.compile(one[0])
        except re.error as error:
            raise self._refusal(str(error)) from None

    def _group(self) -> Node:
        self._nested += 1
        if self._nested > _MOST_NESTED or (self._pattern.startswith("?", self._at) and not self._took("?:")):
            raise self._refusal()
        found = self._either()
        if not self._took(")"):
            raise self._refusal("a group has no end")
        self._nested -= 1
        return found

    def _repeated(self, node: Node) -> Node:
        match = _REPEATED.match(self._pattern, self._at)
        if match is None or isinstance(node, _Edge):
            return node
        self._at = match.end()
        if match[1]:
            return _Repeat(node, int(match[1] == "+"), 1 if match[1] == "?" else None)
        least = int(match[2])
        return _Repeat(node, least, (int(match[4]) if match[4] else None) if match[3] else least)

    def _took(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _refusal(self, why: str = "") -> ValueError:
        rest = self._pattern[self._at :][:40]
        return ValueError(f"{self._field}: {self._pattern[:80]!r}: {why or f'{rest!r} in it is not served'}")

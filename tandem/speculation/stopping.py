"""Ends a generation at the first stop condition. Nothing is ever emitted past a stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.speculation.types import Chunk, FinishReason, TokenLogprobs


class TextStream(Protocol):
    """Decodes tokens to text incrementally. Special tokens have no text."""

    def push(self, token: int) -> str:
        """Returns the text completed by this token; "" while a character is incomplete."""

    def flush(self) -> str:
        """Returns the text held back, with replacement characters where it is incomplete."""


class NoText:
    """A TextStream without a tokenizer: the output has no text."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class StopRules:
    """The stop conditions of a generation; `max_new_tokens` already respects the sequence length."""

    max_new_tokens: int
    end_of_sequence_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass(slots=True)
class Stopping:
    """Cuts committed tokens at the first stop, and holds back text that may become a stop string."""

    rules: StopRules
    text: TextStream
    emitted: int = 0
    reason: FinishReason | None = None
    _held: str = field(default="")
    _search: StopSearch | None = field(init=False)

    def __post_init__(self) -> None:
        self._search = StopSearch(self.rules.stop_strings) if self.rules.stop_strings else None

    @property
    def remaining(self) -> int:
        """The number of tokens that may still be produced."""
        return 0 if self.reason else self.rules.max_new_tokens - self.emitted

    def left_after(self, tokens: Sequence[int]) -> int:
        """Returns how many tokens may still be produced after `tokens`; 0 if none, or if it depends on their text."""
        rules = self.rules
        stops = any(t in rules.end_of_sequence_ids or t in rules.stop_token_ids for t in tokens)
        if self.reason or rules.stop_strings or stops:
            return 0
        return max(0, rules.max_new_tokens - self.emitted - len(tokens))

    def push(
        self, tokens: Sequence[int], margins: Sequence[float] = (), logprobs: Sequence[TokenLogprobs] = ()
    ) -> Chunk:
        """Returns the part of the newly committed `tokens` up to and including the stop, with its text."""
        kept: list[int] = []
        text = ""
        for token in tokens:
            if self.reason:
                break
            kept.append(token)
            text += self._take(token)
        return Chunk(tuple(kept), text, tuple(margins[: len(kept)]), tuple(logprobs[: len(kept)]))

    def _take(self, token: int) -> str:
        self.emitted += 1
        if token in self.rules.end_of_sequence_ids:
            return self._finish(FinishReason.END_OF_SEQUENCE)
        if token in self.rules.stop_token_ids:
            return self._finish(FinishReason.STOP_TOKEN)
        text = self.text.push(token)
        self._held += text
        cut = self._search.first_in(text) if self._search else None
        if cut is not None:
            self.reason = FinishReason.STOP_STRING
            return self._held[: len(self._held) - cut]
        if self.emitted == self.rules.max_new_tokens:
            return self._finish(FinishReason.LENGTH)
        cut = len(self._held) - (
            self._search.begun if self._search else 0
        )  # the rest may be the beginning of a stop string
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _finish(self, reason: FinishReason) -> str:
        """Ends the generation and returns the rest of the text, up to a stop string if it completes one."""
        self.reason = reason
        text = self.text.flush()
        rest, cut = self._held + text, self._search.first_in(text) if self._search else None
        return rest if cut is None else rest[: len(rest) - cut]


class StopSearch:
    """Finds stop strings in text as it arrives, with the Knuth-Morris-Pratt search for each string.

    `steps` counts comparisons: at most two for each character of the text and each string that it may belong to,
    however long the strings are, and two for each character of the strings.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._idle: dict[str, list[_Match]] = {}  # strings of which nothing is matched, by first character
        self._begun: list[_Match] = []
        self.steps = 0
        for string in dict.fromkeys(strings):
            self._idle.setdefault(string[0], []).append(_Match(string))

    @property
    def begun(self) -> int:
        """The length of the longest suffix of the text so far that is the beginning of a stop string."""
        return max((match.length for match in self._begun), default=0)

    def first_in(self, text: str) -> int | None:
        """Returns how far before the end of `text` the earliest stop string that it completes begins, or None."""
        found = None
        for after, character in zip(range(len(text) - 1, -1, -1), text, strict=True):
            if not self._begun and character not in self._idle:
                continue
            starting = self._idle.pop(character, [])
            begun, self._begun = [*self._begun, *starting], []
            for match in begun:
                self.steps += match.feed(character)
                if match.length == len(match.string):
                    start = after + match.length
                    found = start if found is None else max(found, start)
                    match.length = 0  # only its first occurrence counts
                elif match.length:
                    self._begun.append(match)
                else:
                    self._idle.setdefault(match.string[0], []).append(match)
        return found


@dataclass(slots=True)
class _Match:
    """The length of the prefix of a string that the text so far ends with.

    `_falls[n]`: the length of the longest proper prefix that is also a suffix of the first n + 1 characters, computed
    as far as needed.
    """

    string: str
    length: int = 0
    _falls: list[int] = field(default_factory=lambda: [0])

    def feed(self, character: str) -> int:
        """Processes the next character of the text. Returns the number of comparisons."""
        steps = 1
        while self.length and self.string[self.length] != character:
            self.length = self._falls[self.length - 1]
            steps += 1
        if self.string[self.length] == character:
            self.length += 1
            steps += self._learn()
        return steps

    def _learn(self) -> int:
        """Extends `_falls` to the present length. Returns the number of comparisons."""
        string, n, steps = self.string, self.length - 1, 0
        while len(self._falls) <= n:
            at = len(self._falls)
            fall = self._falls[-1]
            while fall and string[at] != string[fall]:
                fall, steps = self._falls[fall - 1], steps + 1
            self._falls.append(fall + (string[at] == string[fall]))
            steps += 1
        return steps

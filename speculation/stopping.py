"""Where a generation ends. Nothing is ever emitted past a stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from speculation.types import Chunk, FinishReason


class TextStream(Protocol):
    """Turns tokens into text as they come. Special tokens have no text."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; "" while a character is incomplete."""

    def flush(self) -> str:
        """What was held back, as well as it can be shown."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a generation; `max_new_tokens` is already limited by the sequence length."""

    max_new_tokens: int
    end_of_sequence_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass(slots=True)
class Stopping:
    """Cuts committed tokens at the first stop and holds back text that may turn out to be a stop string."""

    rules: StopRules
    text: TextStream
    emitted: int = 0
    reason: FinishReason | None = None
    _held: str = field(default="")

    @property
    def remaining(self) -> int:
        """Tokens that may still be produced."""
        return 0 if self.reason else self.rules.max_new_tokens - self.emitted

    def left_after(self, tokens: Sequence[int]) -> int:
        """Tokens that may still be produced once `tokens` are pushed. 0: none, or only their text will tell."""
        rules = self.rules
        if rules.stop_strings or any(t in rules.end_of_sequence_ids or t in rules.stop_token_ids for t in tokens):
            return 0
        return max(0, self.remaining - len(tokens))

    def push(self, tokens: Sequence[int], margins: Sequence[float] = ()) -> Chunk:
        """The part of newly committed `tokens` that comes before or at the stop, with its text."""
        kept: list[int] = []
        text = ""
        for token in tokens:
            if self.reason:
                break
            kept.append(token)
            text += self._take(token)
        return Chunk(tuple(kept), text, tuple(margins[: len(kept)]))

    def _take(self, token: int) -> str:
        self.emitted += 1
        if token in self.rules.end_of_sequence_ids:
            return self._finish(FinishReason.END_OF_SEQUENCE)
        if token in self.rules.stop_token_ids:
            return self._finish(FinishReason.STOP_TOKEN)
        self._held += self.text.push(token)
        found = [at for s in self.rules.stop_strings if (at := self._held.find(s)) >= 0]
        if found:
            self.reason = FinishReason.STOP_STRING
            return self._held[: min(found)]
        if self.emitted == self.rules.max_new_tokens:
            return self._finish(FinishReason.LENGTH)
        return self._release()

    def _finish(self, reason: FinishReason) -> str:
        """Ends here; the rest of the text goes out unless it completes a stop string."""
        self.reason = reason
        rest = self._held + self.text.flush()
        cuts = [at for s in self.rules.stop_strings if (at := rest.find(s)) >= 0]
        return rest[: min(cuts)] if cuts else rest

    def _release(self) -> str:
        """Text that no stop string can still reach back into."""
        keep = max((_overlap(self._held, s) for s in self.rules.stop_strings), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0

"""Ends a generation at the first stop condition; nothing after it is emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.speculation.types import Chunk, FinishReason, TokenLogprobs


class TextStream:
    """Decodes tokens incrementally; special tokens have no text, and here none has any."""

    def push(self, token: int) -> str:
        """Returns the text that the token completes."""
        return ""

    def flush(self) -> str:
        """Returns the rest, with replacement characters."""
        return ""


@dataclass(slots=True)
class Stopping:
    """Cuts tokens at the first stop; holds back text that may become a stop string."""

    text: TextStream
    max_new_tokens: int  # within the sequence length
    end_of_sequence_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    emitted: int = 0
    reason: FinishReason | None = None
    _held: str = field(default="")

    @property
    def remaining(self) -> int:
        return 0 if self.reason else self.max_new_tokens - self.emitted

    def left_after(self, tokens: Sequence[int]) -> int:
        """Returns the tokens that may follow `tokens`; 0 also if their text decides."""
        stops = any(t in self.end_of_sequence_ids or t in self.stop_token_ids for t in tokens)
        if self.reason or self.stop_strings or stops:
            return 0
        return max(0, self.max_new_tokens - self.emitted - len(tokens))

    def push(
        self, tokens: Sequence[int], margins: Sequence[float] = (), logprobs: Sequence[TokenLogprobs] = ()
    ) -> Chunk:
        """Returns `tokens` up to and including the stop, with their text."""
        kept: list[int] = []
        text = ""
        for token in tokens:
            if self.reason:
                break
            kept.append(token)
            text += self._take(token)
        count = len(kept)
        return Chunk(tuple(kept), text, tuple(margins[:count]), tuple(logprobs[:count]), (count,) if kept else ())

    def _take(self, token: int) -> str:
        self.emitted += 1
        if token in self.end_of_sequence_ids:
            return self._finish(FinishReason.END_OF_SEQUENCE)
        if token in self.stop_token_ids:
            return self._finish(FinishReason.STOP_TOKEN)
        self._held += self.text.push(token)
        cut = self._stop_in_held()
        if cut is not None:
            self.reason = FinishReason.STOP_STRING
            return self._held[:cut]
        if self.emitted == self.max_new_tokens:
            return self._finish(FinishReason.LENGTH)
        free = len(self._held) - self._begun()
        text, self._held = self._held[:free], self._held[free:]
        return text

    def _finish(self, reason: FinishReason) -> str:
        self.reason = reason
        self._held += self.text.flush()
        return self._held[: self._stop_in_held()]

    def _stop_in_held(self) -> int | None:
        return min((at for each in self.stop_strings if (at := self._held.find(each)) >= 0), default=None)

    def _begun(self) -> int:
        """Returns the length of the held text's longest suffix that may become a stop string."""
        strings, held = self.stop_strings, self._held
        if not strings:
            return 0
        return next((n for n in range(len(held), 0, -1) if any(each.startswith(held[-n:]) for each in strings)), 0)

"""Merges a request's outputs at several servers."""

from __future__ import annotations

from tandem.rpc.errors import TandemError
from tandem.speculation.types import Chunk


class Repetition:
    def __init__(self) -> None:
        self.tokens: list[int] = []  # yielded
        self._text = ""
        self._repeated_tokens = 0
        self._repeated_text = ""

    def restart(self) -> None:
        self._repeated_tokens, self._repeated_text = 0, ""

    def fresh(self, chunk: Chunk) -> Chunk | None:
        """Returns `chunk` without yielded tokens, if any are left. Raises TandemError if they differ."""
        start, end = self._repeated_tokens, self._repeated_tokens + len(chunk.token_ids)
        known = self.tokens[start:end]
        if list(chunk.token_ids[: len(known)]) != known:
            raise TandemError("DATA_LOSS", "the repeated request produced other tokens: the servers run other models")
        self._repeated_tokens, self._repeated_text = end, self._repeated_text + chunk.text
        tokens = chunk.token_ids[len(known) :]
        text = self._repeated_text[len(self._text) :]
        self.tokens += tokens
        self._text += text
        new = len(known)
        return Chunk(tokens, text, chunk.margins[new:], chunk.logprobs[new:]) if tokens or text else None

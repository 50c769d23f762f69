"""Joins the outputs of a request that was repeated at another server into one."""

from __future__ import annotations

from tandem.rpc.errors import TandemError
from tandem.speculation.types import Chunk


class Repetition:
    """Remembers what a request has yielded, so that a repetition of it yields only what comes after that."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """All tokens yielded so far."""
        self._text = ""
        self._repeated_tokens = 0
        self._repeated_text = ""

    def restart(self) -> None:
        """The request begins again from its first token."""
        self._repeated_tokens, self._repeated_text = 0, ""

    def fresh(self, chunk: Chunk) -> Chunk | None:
        """Returns the part of `chunk` that was not yielded before, if any. Raises TandemError if the tokens differ."""
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

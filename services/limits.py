"""What one caller may have at a time, and how large what it sends may be."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from speculation.types import GenerationRequest, InvalidField, TooLong

BYTES_PER_TOKEN = 64
"""No prompt has more bytes per token than this, unless a server says so: longer text is not even tokenized."""
MOST_STOP_STRINGS = 64


class LimitReached(RuntimeError):
    """The caller has as much under way as one caller may."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit of its own. KV slots and the sequence length bound everybody together in any case.

    `max_prompt_bytes`: of a text prompt, before it is tokenized; None: 64 per token of the sequence length.
    `max_proposal_sessions` and `max_proposal_bytes` bound the sessions of proposals of everybody together, which need
    no slot where n-gram lookup drafts; one caller with a name may have half of either.
    """

    max_sessions_per_identity: int | None = None
    max_requests_per_identity: int | None = None
    max_prompt_bytes: int | None = None
    max_proposal_sessions: int = 1024
    max_proposal_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is below 1")

    def check_sessions(self, opened: int) -> None:
        """Whether a caller with so many open sessions may open another. Raises LimitReached."""
        most = self.max_sessions_per_identity
        if most is not None and opened >= most:
            raise LimitReached(f"max_sessions_per_identity: {opened} of your sessions are open, {most} is the most")

    def check_prompt(self, request: GenerationRequest, max_sequence_length: int) -> None:
        """Before any work is done with it. Raises TooLong and InvalidField."""
        if request.token_ids is not None and len(request.token_ids) > max_sequence_length:
            raise TooLong(
                f"the prompt has {len(request.token_ids)} tokens and the sequence length is {max_sequence_length}: "
                f"no room to generate"
            )
        most = self.max_prompt_bytes or BYTES_PER_TOKEN * max_sequence_length
        length = len((request.text or "").encode())
        if length > most:
            raise TooLong(f"the prompt has {length} bytes and this server takes {most} (max_prompt_bytes)")
        if len(request.stop_strings) > MOST_STOP_STRINGS:
            raise InvalidField(
                "stop_strings", f"{len(request.stop_strings)} are above the limit of {MOST_STOP_STRINGS}"
            )


class Running:
    """How many requests of each caller are under way."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.max_requests_per_identity
        self._running: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, identity: str) -> Iterator[None]:
        """One more of this caller. Raises LimitReached."""
        under_way = self._running[identity]
        if self._most is not None and under_way >= self._most:
            raise LimitReached(
                f"max_requests_per_identity: {under_way} of your requests are under way, {self._most} is the most"
            )
        self._running[identity] += 1
        try:
            yield
        finally:
            self._running[identity] -= 1
            if not self._running[identity]:
                del self._running[identity]

"""Limits on each caller's concurrent work and on the size of requests."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from tandem.rpc.wire_chat import texts_of
from tandem.services.security.names import check_name
from tandem.speculation.types import InvalidField, TooLong

BYTES_PER_TOKEN = 64
"""Default limit on a prompt's bytes per token of the sequence length; longer text is refused before tokenization."""
MAX_STOP_STRINGS = 64
LONGEST_STOP_STRING = 1024  # characters
MAX_STOP_TOKENS = 1024


MESSAGE_BYTES = 4 * 1024 * 1024
_BESIDE_PROMPTS = 4 * LONGEST_STOP_STRING * MAX_STOP_STRINGS + 64 * 1024


def message_bytes(sequence_length: int, max_prompt_bytes: int | None) -> int:
    """Returns the default limit of a request in bytes: enough for a prompt and its stop strings, at most 4 MiB.

    Parsing a message of 4 MiB blocks the event loop for 30 ms.
    """
    return min(MESSAGE_BYTES, (max_prompt_bytes or BYTES_PER_TOKEN * sequence_length) + _BESIDE_PROMPTS)


class LimitReached(RuntimeError):
    """The caller has reached a limit on its concurrent work."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """A server's limits. None: no limit besides KV slots and the sequence length, which always apply.

    `max_prompt_bytes` limits a text prompt before tokenization; None: 64 bytes per token of the sequence length.
    `max_proposal_sessions` and `max_proposal_bytes` limit the proposal sessions of all callers together, since n-gram
    lookup needs no slot; one named caller may use half of each. `max_calls_per_caller` counts by identity, or by
    machine for anonymous callers. Probes are health checks, limited separately for Check and for Watch.
    `message_seconds`: how long a request may take to arrive. `unread_seconds`: how long replies may stay unread.
    """

    max_sessions_per_identity: int | None = None
    max_requests_per_identity: int | None = None
    max_prompt_bytes: int | None = None
    max_proposal_sessions: int = 1024
    max_proposal_bytes: int = 256 * 1024 * 1024
    max_calls_per_caller: int = 1024
    max_calls: int = 4096
    max_probes_per_caller: int = 64
    max_probes: int = 256
    message_seconds: float = 30.0
    unread_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name.endswith("_seconds"):
                if not value > 0:
                    raise ValueError(f"{name}: {value} is not above 0")
            elif value is not None and value < 1:
                raise ValueError(f"{name}: {value} is below 1")

    def running(self) -> ConcurrencyLimit:
        """Returns what counts each caller's running requests."""
        return ConcurrencyLimit("max_requests_per_identity", "your requests", self.max_requests_per_identity)

    def check_sessions(self, opened: int) -> None:
        """Raises LimitReached if a caller with `opened` open sessions may not open another."""
        most = self.max_sessions_per_identity
        if most is not None and opened >= most:
            raise LimitReached(f"max_sessions_per_identity: {opened} of your sessions are open, the limit is {most}")

    def check_generation(self, message: Any, max_sequence_length: int) -> None:
        """Checks the counts and lengths of a tandem.v1.Generation before reading it. Raises TooLong, InvalidField."""
        text = message.text or texts_of(message.messages)
        self.check_prompt(len(message.token_ids.ids), text, max_sequence_length)
        self.check_prompt(0, message.prediction, max_sequence_length, "prediction")
        check_stops(message.stop_token_ids, "stop_strings", message.stop_strings)
        check_name("adapter", message.adapter)

    def check_prompt(self, tokens: int, text: str, max_sequence_length: int, what: str = "prompt") -> None:
        """Raises TooLong if a prompt of so many token ids, or of that text, is too long to be read."""
        if tokens > max_sequence_length:
            raise TooLong(
                f"the prompt has {tokens} tokens and the sequence length is {max_sequence_length}: no room to generate"
            )
        most = self.max_prompt_bytes or BYTES_PER_TOKEN * max_sequence_length
        length = len(text.encode())
        if length > most:
            raise TooLong(f"the {what} has {length} bytes and this server takes {most} (max_prompt_bytes)")


def check_stops(token_ids: Sized, name: str, strings: Sequence[str]) -> None:
    """Checks the counts and lengths of what ends a generation; `name`: of the field `strings`. Raises InvalidField."""
    check_count("stop_token_ids", token_ids, MAX_STOP_TOKENS)
    check_count(name, strings, MAX_STOP_STRINGS)
    for i, string in enumerate(strings):
        check_count(f"{name}[{i}]", string, LONGEST_STOP_STRING, "characters ")


def check_count(field: str, values: Sized, most: int, what: str = "") -> None:
    """Raises InvalidField naming the field, the count and the limit."""
    if len(values) > most:
        raise InvalidField(field, f"{len(values)} {what}are above the limit of {most}")


class ConcurrencyLimit:
    """Counts what each caller has under way, limited to `most_each` per caller and `most` in total; None: no limit.

    `name` and `yours`: what errors call the limit, and what a caller has under way.
    """

    def __init__(self, name: str = "", yours: str = "", most_each: int | None = None, most: int | None = None) -> None:
        self._name, self._yours, self._most_each, self._most = name, yours, most_each, most
        self._of: Counter[str] = Counter()
        self._all = 0

    def __len__(self) -> int:
        return self._all

    def of(self, who: str) -> int:
        return self._of[who]

    def begin(self, who: str) -> None:
        """Counts one more until `end`. Raises LimitReached."""
        mine, most = self.of(who), self._most_each
        if most is not None and mine >= most:
            raise LimitReached(f"{self._name}: {mine} of {self._yours} are running, the limit is {most}")
        if self._most is not None and len(self) >= self._most:
            raise LimitReached(f"{self._name}: {len(self)} are running, the limit is {self._most}")
        self._of[who] += 1
        self._all += 1

    def end(self, who: str) -> None:
        self._all -= 1
        self._of[who] -= 1
        if not self._of[who]:
            del self._of[who]

    @contextlib.contextmanager
    def one(self, who: str) -> Iterator[None]:
        """Counts one more while the block runs. Raises LimitReached."""
        self.begin(who)
        try:
            yield
        finally:
            self.end(who)

"""Limits on callers' concurrent work and request sizes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from tandem.rpc.wire import texts_of
from tandem.speculation.types import InvalidField, TooLong

BYTES_PER_TOKEN = 64  # of a prompt, per token of the sequence length, checked before tokenization
MAX_STOP_STRINGS = 64
LONGEST_STOP_STRING = 1024  # characters
MAX_STOP_TOKENS = 1024
MAX_NAME = 256


MESSAGE_BYTES = 4 * 1024 * 1024
_BESIDE_PROMPTS = 4 * LONGEST_STOP_STRING * MAX_STOP_STRINGS + 64 * 1024


def message_bytes(sequence_length: int, max_prompt_bytes: int | None) -> int:
    """Returns the default request limit: prompt and stop strings, at most 4 MiB, which take 30 ms to parse."""
    return min(MESSAGE_BYTES, (max_prompt_bytes or BYTES_PER_TOKEN * sequence_length) + _BESIDE_PROMPTS)


class LimitReached(RuntimeError):
    """The caller has reached a limit on its concurrent work."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """None: no limit but KV slots and sequence length; of `max_prompt_bytes`: 64 per token of the latter.

    `max_calls_per_caller`: by identity, or by machine of the anonymous; probes have a limit of their own.
    """

    max_sessions_per_identity: int | None = None
    max_requests_per_identity: int | None = None
    max_prompt_bytes: int | None = None
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
        return ConcurrencyLimit("max_requests_per_identity", "your requests", self.max_requests_per_identity)

    def check_sessions(self, opened: int) -> None:
        most = self.max_sessions_per_identity
        if most is not None and opened >= most:
            raise LimitReached(f"max_sessions_per_identity: {opened} of your sessions are open, the limit is {most}")

    def check_generation(self, message: Any, max_sequence_length: int) -> None:
        """Checks counts and lengths of a Generation before reading it. Raises TooLong, InvalidField."""
        text = message.text or texts_of(message.messages)
        self.check_prompt(len(message.token_ids.ids), text, max_sequence_length)
        self.check_prompt(0, message.prediction, max_sequence_length, "prediction")
        check_stops(message.stop_token_ids, "stop_strings", message.stop_strings)
        check_name("adapter", message.adapter)

    def check_prompt(self, tokens: int, text: str, max_sequence_length: int, what: str = "prompt") -> None:
        """Raises TooLong for an oversized prompt."""
        if tokens > max_sequence_length:
            raise TooLong(
                f"the prompt has {tokens} tokens and the sequence length is {max_sequence_length}: no room to generate"
            )
        most = self.max_prompt_bytes or BYTES_PER_TOKEN * max_sequence_length
        length = len(text.encode())
        if length > most:
            raise TooLong(f"the {what} has {length} bytes and this server takes {most} (max_prompt_bytes)")


def check_stops(token_ids: Sized, name: str, strings: Sequence[str]) -> None:
    """Checks counts and lengths of stop tokens and strings; `name`: of `strings`. Raises InvalidField."""
    check_count("stop_token_ids", token_ids, MAX_STOP_TOKENS)
    check_count(name, strings, MAX_STOP_STRINGS)
    for i, string in enumerate(strings):
        check_count(f"{name}[{i}]", string, LONGEST_STOP_STRING, "characters ")


def check_count(field: str, values: Sized, most: int, what: str = "") -> None:
    if len(values) > most:
        raise InvalidField(field, f"{len(values)} {what}are above the limit of {most}")


def check_name(field: str, given: str, least: int = 0, most: int = MAX_NAME) -> str:
    """Returns `given` if of `least` to `most` printable characters; raises InvalidField without quoting it."""
    if not least <= len(given) <= most:
        raise InvalidField(field, f"length {len(given)} is outside {least} to {most}")
    if not given.isprintable():
        raise InvalidField(field, "it has characters that cannot be printed")
    return given


class ConcurrencyLimit:
    """Limits running work to `most_each` per caller and `most` in total; None: no limit. `yours` words errors."""

    def __init__(self, name: str = "", yours: str = "", most_each: int | None = None, most: int | None = None) -> None:
        self._name, self._yours, self._most_each, self._most = name, yours, most_each, most
        self._of: Counter[str] = Counter()
        self._all = 0

    def __len__(self) -> int:
        return self._all

    def of(self, who: str) -> int:
        return self._of[who]

    def begin(self, who: str) -> None:
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
        """Counts one while the block runs. Raises LimitReached."""
        self.begin(who)
        try:
            yield
        finally:
            self.end(who)

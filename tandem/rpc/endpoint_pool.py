"""Selects the server to call, spaces retries and decides when to give up. Pure: clock and chance are arguments.

A session can be reopened at any verifier with its committed tokens, and a request repeated at any server, with the same
output, provided that server runs the same target; `disagreement` checks this.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tandem.speculation.types import ModelInfo

log = logging.getLogger("tandem.endpoints")

LOST = ("UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "NOT_FOUND")
"""Codes that reopening a session may fix: the verifier is gone, draining, silent or restarted, or the lease expired."""
CHECK_SECONDS = 5.0
"""How long a server that failed, or was never called, may take to report its model."""
MIN_WAIT = 0.3
"""Shortest wait before giving up on a server, however near the deadline: a health check needs a round trip."""
# Different weights, another precision, or another kind of device give different bits.
_SAME = ("model_name", "weights_revision", "tokenizer_sha256", "vocab_size", "dtype", "device", "backend")
_NO_LESS = ("max_sequence_length", "max_speculation_length")


@dataclass(frozen=True, slots=True)
class Persistence:
    """How long a request keeps retrying without progress; waits between attempts double from `first` to `longest`."""

    seconds: float = 60.0
    first: float = 0.05
    longest: float = 2.0

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise ValueError(f"reconnect_seconds: {self.seconds} is below 0")


class RetryBudget:
    """Limits the retries of one request since its last progress.

    `deadline` is the request's own, on the same clock; the request gives up slightly earlier to leave time for its
    error. `admission`: seconds from `opening` during which full servers are retried.
    """

    def __init__(
        self,
        persistence: Persistence,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        admission: float = 600.0,
    ) -> None:
        self._persistence, self._clock, self._chance = persistence, clock, chance
        self._deadline, self._admission = deadline, admission
        self._admission_ends = clock() + admission
        self._since: float | None = None
        self._end = 0.0
        self.attempts = 0

    def progress(self) -> None:
        """Resets the budget: the next failure is a new one."""
        self._since, self.attempts = None, 0

    def opening(self) -> None:
        """Starts the `admission` period, because a session is about to be opened or reopened."""
        self._admission_ends = self._clock() + self._admission

    def full(self, seconds: float) -> float | None:
        """Returns the seconds to wait before retrying a full server; None when admission has taken too long."""
        self.progress()
        wait = self.limited(seconds)
        return None if self._clock() + wait > self._admission_ends else wait

    def wait(self) -> float | None:
        """Returns the seconds to wait before the next attempt (0.0 before the first), or None to give up.

        Half of each wait is random, so that clients that lost the same server do not return at the same time.
        """
        now = self._clock()
        if self._since is None:
            self._since, self._end = now, now + self._persistence.seconds
            if self._deadline is not None:
                self._end = min(self._end, self._deadline - min(0.2, 0.1 * max(0.0, self._deadline - now)))
        pause = 0.0
        if self.attempts:
            longest = min(self._persistence.longest, self._persistence.first * 2.0 ** min(self.attempts - 1, 30))
            pause = longest * (0.5 + 0.5 * self._chance())
        if now + pause >= self._end:
            return None
        self.attempts += 1
        return pause

    @property
    def seconds(self) -> float:
        """How long the request has been retrying."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def over(self) -> bool:
        """True once the request's deadline has (nearly) passed: a failure now says nothing about the server."""
        return self._deadline is not None and self._clock() >= self._deadline - 0.05

    def limited(self, seconds: float) -> float:
        """Limits a call's timeout to the request's deadline."""
        return seconds if self._deadline is None else max(0.001, min(seconds, self._deadline - self._clock()))

    def before_another(self, seconds: float, share: float, usual: float = 0.0) -> float:
        """Returns how long to wait for one server before trying another.

        This is `seconds`, doubled after each failed attempt (so that one of several slow servers gets enough time),
        and at most `share` of the time until the deadline. An operation that normally takes `usual` seconds gets at
        least that, up to three tenths of the time left.
        """
        wait = seconds * 2.0 ** min(self.attempts, 30)
        if self._deadline is None:
            return max(wait, usual)
        left = self._deadline - self._clock()
        return max(MIN_WAIT, min(wait, share * left), min(usual, 0.3 * left))


class EndpointPool:
    """The configured servers, in order, and the one in use, which changes when it fails. Logs each change once."""

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.addresses, self._clock = tuple(addresses), clock
        self.current = self.addresses[0]
        self.refused: dict[str, str] = {}
        self._silent: dict[str, float] = {}  # since when
        self._attempts = 0

    def __str__(self) -> str:
        return ", ".join(self.addresses)

    def after(self, address: str) -> str:
        """Returns the next address after `address` that is not refused; `address` itself if there is no other."""
        return self.following(address, (address,)) or address

    def following(self, preferred: str, exclude: Collection[str] = ()) -> str | None:
        """Returns the first address from `preferred` on that is neither in `exclude` nor refused; None if none is."""
        at = self.addresses.index(preferred)
        turns = (*self.addresses[at:], *self.addresses[:at])
        return next((each for each in turns if each not in exclude and each not in self.refused), None)

    def failed(self, address: str, reason: str) -> None:
        """Records that a server does not answer, and switches to the next one."""
        self._attempts += 1
        other = self.after(address)
        if self.current == address:
            self.current = other
        if address not in self._silent:
            self._silent[address] = self._clock()
            then = "trying again" if other == address else f"trying {other}"
            log.warning("server at %s does not answer (%s): %s", address, " ".join(reason.split()), then)

    def answered(self, address: str) -> None:
        """Records that the server at `address` answered, and makes it current."""
        if self._silent:
            down = self._clock() - min(self._silent.values())
            log.info("server at %s answers, after %d attempts and %.1f s", address, self._attempts, down)
        self._silent.clear()
        self.refused.pop(address, None)
        self.current, self._attempts = address, 0

    def refuse(self, address: str, reason: str) -> bool:
        """Excludes a server that runs another model. Returns whether any is left; if none, clears all exclusions."""
        if self.refused.get(address) != reason:
            log.error("server at %s is not used: %s", address, reason)
        self.refused[address] = reason
        self.current = self.after(address)
        left = self.current not in self.refused
        if not left:
            self.refused.clear()
        return left


def disagreement(first: ModelInfo, other: ModelInfo) -> str | None:
    """Returns why a session of `first` cannot continue at `other` with the same tokens; None if it can."""
    for name in _SAME:
        expected, found = getattr(first, name), getattr(other, name)
        if expected != found:
            return f"its {name} is {found!r}, but this client started with {expected!r}"
    for name in _NO_LESS:
        expected, found = getattr(first, name), getattr(other, name)
        if found < expected:
            return f"its {name} is {found}, below the {expected} that this client started with"
    return None


def parse_addresses(given: str, field: str = "target_host") -> tuple[str, ...]:
    """Splits HOST:PORT[,HOST:PORT...] and checks each address. Raises ValueError naming the field."""
    addresses = tuple(part.strip() for part in given.split(","))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"{field}: {address!r} is not HOST:PORT")
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"{field}: {given!r} names a server twice")
    return addresses

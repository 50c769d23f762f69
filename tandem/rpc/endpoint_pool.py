"""Which verifier is asked, when again, and when to give up. Pure: clock and chance are arguments.

A session can be opened again anywhere with what is committed, and says the same tokens: what must hold for that is that
the other verifier runs the same target, which `disagreement` finds out.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tandem.speculation.types import ModelInfo

log = logging.getLogger("tandem.verifier")

LOST = ("UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "NOT_FOUND")
"""What opening the session again may mend: the verifier is gone, stopping, silent, or a new one; the lease ran out."""
CHECK_SECONDS = 5.0
"""How long a verifier that failed, or was never asked, may take to say what it runs."""
LEAST_WAIT = 0.3
"""No verifier is given up in less, however near the deadline: a health check needs a round trip."""
# Other bits come from other weights, another precision, or the same on another kind of device.
_SAME = ("model_name", "weights_revision", "tokenizer_sha256", "vocab_size", "dtype", "device", "backend")
_NO_LESS = ("max_sequence_length", "max_speculation_length")


@dataclass(frozen=True, slots=True)
class Persistence:
    """`seconds`: how long a request goes on without progress. Waits between attempts double, `first` to `longest`."""

    seconds: float = 60.0
    first: float = 0.05
    longest: float = 2.0

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise ValueError(f"reconnect_seconds: {self.seconds} is below 0")


class RetryBudget:
    """One request's: how often and how long it has tried since it last got on.

    `deadline` is the request's own, by the same clock; it gives up a little earlier, so that it can still say so.
    `admission`: for how many seconds verifiers that are full are asked again, from `opening` on.
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
        """It got on: whatever fails next is a new failure."""
        self._since, self.attempts = None, 0

    def opening(self) -> None:
        """A session is to be opened, perhaps again: the seconds of `admission` begin."""
        self._admission_ends = self._clock() + self._admission

    def full(self, seconds: float) -> float | None:
        """Returns seconds to wait before a full verifier is asked again; None when admission has taken too long."""
        self.progress()
        wait = self.limited(seconds)
        return None if self._clock() + wait > self._admission_ends else wait

    def wait(self) -> float | None:
        """Seconds to wait before the next attempt, the first of them none; None: give up.

        Half of a wait is chance: clients that lost one verifier together do not come back together.
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
        """How long it has been trying."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def over(self) -> bool:
        """The request's own deadline has passed, or as good as: what fails now says nothing about a verifier."""
        return self._deadline is not None and self._clock() >= self._deadline - 0.05

    def limited(self, seconds: float) -> float:
        """A call's timeout within the request's deadline."""
        return seconds if self._deadline is None else max(0.001, min(seconds, self._deadline - self._clock()))

    def before_another(self, seconds: float, share: float, usual: float = 0.0) -> float:
        """How long to wait for one verifier where another could be asked.

        That is `seconds`, twice as long after each attempt that failed (where all are slow, one of them is waited for),
        and at most `share` of the time until the request's deadline. What takes `usual` seconds when nothing is wrong
        may take that long, or three tenths of that time.
        """
        wait = seconds * 2.0 ** min(self.attempts, 30)
        if self._deadline is None:
            return max(wait, usual)
        left = self._deadline - self._clock()
        return max(LEAST_WAIT, min(wait, share * left), min(usual, 0.3 * left))


class EndpointPool:
    """The verifiers that may be asked, in order, and which of them is: one until it fails. Says each change once."""

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.addresses, self._clock = tuple(addresses), clock
        self.current = self.addresses[0]
        self.refused: dict[str, str] = {}
        self._silent: dict[str, float] = {}  # since when
        self._attempts = 0

    def __str__(self) -> str:
        return ", ".join(self.addresses)

    def after(self, address: str) -> str:
        """Whose turn it is after `address`: the next that is not refused; itself, where there is no other."""
        return self.following(address, (address,)) or address

    def following(self, preferred: str, asked: Collection[str] = ()) -> str | None:
        """Whom to ask besides those that are `asked` already: `preferred`, or those after it; None: nobody is left."""
        at = self.addresses.index(preferred)
        turns = (*self.addresses[at:], *self.addresses[:at])
        return next((each for each in turns if each not in asked and each not in self.refused), None)

    def failed(self, address: str, reason: str) -> None:
        """It does not answer: others are asked first."""
        self._attempts += 1
        other = self.after(address)
        if self.current == address:
            self.current = other
        if address not in self._silent:
            self._silent[address] = self._clock()
            then = "trying again" if other == address else f"trying {other}"
            log.warning("verifier at %s does not answer (%s): %s", address, " ".join(reason.split()), then)

    def answered(self, address: str) -> None:
        """A session was opened there."""
        if self._silent:
            down = self._clock() - min(self._silent.values())
            log.info("verifier at %s answers, after %d attempts and %.1f s", address, self._attempts, down)
        self._silent.clear()
        self.refused.pop(address, None)
        self.current, self._attempts = address, 0

    def refuse(self, address: str, reason: str) -> bool:
        """It runs something else. Whether another is left; where none is, all may be asked again by a later request."""
        if self.refused.get(address) != reason:
            log.error("verifier at %s is not asked: %s", address, reason)
        self.refused[address] = reason
        self.current = self.after(address)
        left = self.current not in self.refused
        if not left:
            self.refused.clear()
        return left


def disagreement(first: ModelInfo, other: ModelInfo) -> str | None:
    """Why a session of `first` cannot go on at `other` with the same tokens; None: it can."""
    for name in _SAME:
        expected, found = getattr(first, name), getattr(other, name)
        if expected != found:
            return f"its {name} is {found!r}, and this client began with {expected!r}"
    for name in _NO_LESS:
        expected, found = getattr(first, name), getattr(other, name)
        if found < expected:
            return f"its {name} is {found}, below the {expected} that this client began with"
    return None


def addresses_of(given: str) -> tuple[str, ...]:
    """HOST:PORT[,HOST:PORT...] apart. Raises ValueError."""
    addresses = tuple(part.strip() for part in given.split(","))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"target_host: {address!r} is not HOST:PORT")
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"target_host: {given!r} names a verifier twice")
    return addresses

"""How many rounds in flight pay: from measured draft, verify and network times and measured acceptance. Pure.

The model is the pipeline itself, played through: rounds drafted one after the other, verified in order, until one of
them misses. What it expects is put beside stop-and-wait, and the least depth that is nearly as good as the best wins:
a round more in flight than pays is a draft step and a message for nothing.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.speculation.theory import expected_tokens_measured

WORTH = 0.03
"""A depth must be expected to save this share of the time per token before a smaller one is left for it."""
NEAR = 0.25
"""A network shorter than this share of a verification hides nothing worth having: drafting ahead takes longer than it
saves where draft and target share cores. Measured on one machine (network 1 ms, verification 11): `auto` took 1.1 to
1.2 times as long per token as stop-and-wait before it knew."""
PRIOR_RATE, PRIOR_TRIALS = 0.6, 2.0
"""What is thought of a position's acceptance before it has been seen, and how many trials that is worth."""
MEMORY = 0.95
"""Weight of what was known of acceptance, at every new round: the text of some 20 rounds counts."""
SMOOTHING = 0.2
"""Weight of a new time among those before."""
FARTHEST = 64
"""Rounds after which a cycle is taken to end."""


class Pipeline(enum.Enum):
    """Whether rounds overlap. The values name it on the command line."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"

    @classmethod
    def named(cls, name: str) -> Pipeline:
        if name not in {one.value for one in cls}:
            raise ValueError(f"pipeline: {name!r} is not one of {', '.join(one.value for one in cls)}")
        return cls(name)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: of one draft token, of one verification, and of the network there and back."""

    draft: float
    verify: float
    rtt: float


@dataclass(slots=True)
class MeasuredTimes:
    """Smoothed times of everything that goes one way to one target; None until there is one of each."""

    _draft: float | None = None
    _verify: float | None = None
    _rtt: float | None = None

    def drafted(self, tokens: int, seconds: float) -> None:
        if tokens:
            self._draft = _smoothed(self._draft, seconds / tokens)

    def verified(self, verify_seconds: float, network_seconds: float) -> None:
        self._verify = _smoothed(self._verify, verify_seconds)
        self._rtt = _smoothed(self._rtt, network_seconds)

    @property
    def known(self) -> Times | None:
        if self._draft is None or self._verify is None or self._rtt is None:
            return None
        return Times(self._draft, self._verify, self._rtt)


@dataclass(slots=True)
class MeasuredRates:
    """Conditional acceptance by position in a round; the position after the drafts is the guess of the bonus token."""

    _reached: list[float] = field(default_factory=list)
    _right: list[float] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int, guessed: bool | None = None) -> None:
        """One round: `guessed` says whether the guess that followed was right, None where none was made."""
        outcomes = [True] * accepted + [False] * (accepted < drafted)
        if accepted == drafted and guessed is not None:
            outcomes.append(guessed)
        grow = len(outcomes) - len(self._reached)
        self._reached += [0.0] * grow
        self._right += [0.0] * grow
        self._reached = [MEMORY * n for n in self._reached]
        self._right = [MEMORY * n for n in self._right]
        for i, right in enumerate(outcomes):
            self._reached[i] += 1
            self._right[i] += right

    def rates(self, count: int) -> list[float]:
        """Of the first `count` positions; each is drawn towards the rate of all, the less it was seen the more."""
        overall = (sum(self._right) + PRIOR_RATE * PRIOR_TRIALS) / (sum(self._reached) + PRIOR_TRIALS)
        seen = itertools.zip_longest(self._right[:count], self._reached[:count], range(count), fillvalue=0.0)
        return [(right + PRIOR_TRIALS * overall) / (reached + PRIOR_TRIALS) for right, reached, _ in seen]


class Depth:
    """Chooses for one request; `times` are shared by all requests to a target."""

    def __init__(self, pipeline: Pipeline, most: int, times: MeasuredTimes | None = None) -> None:
        if most < 1:
            raise ValueError(f"depth: at least 1 round must be in flight, not {most}")
        self._least = min(most, 2 if pipeline is Pipeline.ON else 1)
        self._most = 1 if pipeline is Pipeline.OFF else most
        self.times = times or MeasuredTimes()
        self.rates = MeasuredRates()

    def of(self, k: int) -> int:
        """Rounds of `k` draft tokens to have in flight now. Without drafts there is nothing to run ahead with."""
        times = self.times.known
        if k == 0:
            return 1
        if times is None or self._most == 1:
            return self._least
        if times.rtt < NEAR * times.verify:
            return self._least
        rates = tuple(round(rate, 2) for rate in self.rates.rates(k + 1))
        chosen = best_depth(_coarse(times), k, rates, self._most)
        return max(self._least, chosen)


@functools.lru_cache(maxsize=1024)
def best_depth(times: Times, k: int, rates: tuple[float, ...], most: int) -> int:
    """The least depth within `WORTH` of the best. `rates`: of the k drafts and of the guess after them."""
    expected = [expected_tpot(depth, times, k, rates) for depth in range(1, most + 1)]
    enough = min(expected) * (1 + WORTH)
    return next(depth for depth, tpot in enumerate(expected, 1) if tpot <= enough)


def expected_tpot(depth: int, times: Times, k: int, rates: Sequence[float]) -> float:
    """Seconds per token with up to `depth` rounds of `k` drafts in flight; 1 is stop-and-wait, with nothing guessed."""
    per_round = expected_tokens_measured(rates[:k])
    if depth == 1:
        return (k * times.draft + times.rtt + times.verify) / per_round
    goes_on = math.prod(rates[: k + 1])
    seconds = tokens = 0.0
    reached = 1.0  # the chance that a cycle comes to its m-th round
    for m, ended in enumerate(_ends(depth, times, k), 1):
        tokens += reached * per_round
        last = m == FARTHEST or reached * goes_on < 1e-3
        seconds += ended * reached * (1.0 if last else 1 - goes_on)
        reached *= goes_on
        if last:
            break
    return seconds / tokens


def _ends(depth: int, times: Times, k: int) -> list[float]:
    """When a cycle could start anew, had its m-th round missed: its verdict is here and the draft model is free."""
    sent, verdicts = [k * times.draft], []
    begun = [0.0]
    verified = 0.0
    for i in range(FARTHEST + 1):
        verified = max(sent[i] + times.rtt / 2, verified) + times.verify
        verdicts.append(verified + times.rtt / 2)
        begun.append(max(sent[i], verdicts[i + 1 - depth] if i + 1 >= depth else 0.0))
        sent.append(begun[-1] + (k + 1) * times.draft)
    return [_free(verdicts[m], begun, sent, times.draft) for m in range(FARTHEST)]


def _free(now: float, begun: Sequence[float], sent: Sequence[float], guess: float) -> float:
    """When the draft model is free that at `now` may be in the middle of a guess, or of the round after it."""
    for start, end in zip(begun, sent, strict=True):
        if start < now < end:
            return start + guess if now < start + guess else end
    return now


def _coarse(times: Times) -> Times:
    """To steps of a tenth: nearly equal times share an answer."""
    return Times(*(0.0 if t < 1e-6 else 1.1 ** round(math.log(t, 1.1)) for t in (times.draft, times.verify, times.rtt)))


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)

"""Chooses how many rounds to keep in flight, from measured draft, verify and network times and measured acceptance.

It simulates the pipeline: rounds are drafted one after the other and verified in order until one of them misses. The
expected time per token is compared with stop-and-wait, and the smallest depth that is nearly as good as the best is
chosen, because a round in flight that does not pay wastes a draft and a message.
"""

from __future__ import annotations

import bisect
import enum
import functools
import math
from collections.abc import Iterator, Sequence

from tandem.speculation.acceptance_rates import AcceptanceCounts
from tandem.speculation.step_times import MeasuredTimes, Times
from tandem.speculation.theory import expected_tokens_measured

WORTHWHILE_SAVING = 0.03
"""The share of the time per token that a greater depth must be expected to save."""
SHORT_NETWORK = 0.25
"""With a round trip below this share of a verification, depth stays at its minimum: where draft and target share cores,
drafting ahead then costs more than it saves. Measured on one machine (network 1 ms, verification 11 ms): without this
rule `auto` took 1.1 to 1.2 times as long per token as stop-and-wait."""
PRIOR_RATE, PRIOR_TRIALS = 0.6, 2.0
"""The prior acceptance rate of a position, and its weight in trials."""
FADING = 0.95
"""Factor by which each round fades the acceptance counts before it, so that about the last 20 rounds count."""
MAX_ROUNDS = 64
"""Rounds after which a simulated cycle is cut off."""


class Pipeline(enum.Enum):
    """Whether rounds overlap, or the target does not wait for them. The values are used on the command line."""

    OFF = "off"
    ON = "on"
    NEVER_WAITING = "never-waiting"
    AUTO = "auto"


class Depth:
    """Chooses the depth for one request; `times` are shared by all requests to a target."""

    def __init__(self, pipeline: Pipeline, most: int, times: MeasuredTimes | None = None) -> None:
        if most < 1:
            raise ValueError(f"depth: at least 1 round must be in flight, not {most}")
        self._least = min(most, 2 if pipeline is Pipeline.ON else 1)
        self._most = 1 if pipeline is Pipeline.OFF else most
        self.times = times or MeasuredTimes()
        self._acceptance = AcceptanceCounts(FADING)

    def observe(self, drafted: int, accepted: int, bonus: bool | None = None) -> None:
        """Records one round; `bonus`: whether the bonus token drafted after it was right, None if there was none."""
        counts_bonus = accepted == drafted and bonus is not None
        self._acceptance.note(drafted + counts_bonus, accepted + (counts_bonus and bool(bonus)))

    def rates(self, count: int) -> list[float]:
        """Returns the conditional acceptance of the first `count` positions; the bonus token follows the drafts."""
        prior = [PRIOR_RATE] * max(count, len(self._acceptance.trials))
        return self._acceptance.rates(prior, together=PRIOR_TRIALS, each=PRIOR_TRIALS)[0][:count]

    def of(self, k: int) -> int:
        """Returns how many rounds of `k` draft tokens to keep in flight now; 1 if nothing is drafted."""
        times = self.times.known
        if k == 0:
            return 1
        if times is None or self._most == 1:
            return self._least
        if times.rtt < SHORT_NETWORK * times.verify:
            return self._least
        rates = tuple(round(rate, 2) for rate in self.rates(k + 1))
        chosen = best_depth(_coarse(times), k, rates, self._most)
        return max(self._least, chosen)


@functools.lru_cache(maxsize=1024)
def best_depth(times: Times, k: int, rates: tuple[float, ...], most: int) -> int:
    """Returns the smallest depth within WORTHWHILE_SAVING of the best.

    `rates`: conditional acceptance of the k draft tokens and of the drafted bonus token after them.
    """
    expected = [expected_tpot(depth, times, k, rates) for depth in range(1, most + 1)]
    enough = min(expected) * (1 + WORTHWHILE_SAVING)
    return next(depth for depth, tpot in enumerate(expected, 1) if tpot <= enough)


def expected_tpot(depth: int, times: Times, k: int, rates: Sequence[float]) -> float:
    """Returns the seconds per token with up to `depth` rounds of `k` drafts in flight; depth 1 is stop-and-wait."""
    per_round = expected_tokens_measured(rates[:k])
    if depth == 1:
        return (k * times.draft + times.rtt + times.verify) / per_round
    continues = math.prod(rates[: k + 1])
    seconds = tokens = 0.0
    reached = 1.0  # the probability that a cycle reaches its m-th round
    for m, ended in enumerate(_ends(depth, times, k), 1):
        tokens += reached * per_round
        last = m == MAX_ROUNDS or reached * continues < 1e-3
        seconds += ended * reached * (1.0 if last else 1 - continues)
        reached *= continues
        if last:
            break
    return seconds / tokens


def _ends(depth: int, times: Times, k: int) -> Iterator[float]:
    """Yields when a new cycle can start if the m-th round misses: its verdict has come and the draft model is free."""
    begun, sent, verdicts = [0.0], [k * times.draft], list[float]()
    verified = 0.0
    for m in range(MAX_ROUNDS):
        while len(verdicts) <= MAX_ROUNDS and (len(verdicts) <= m or begun[-1] < verdicts[m]):
            verified = max(sent[-1] + times.rtt / 2, verified) + times.verify
            verdicts.append(verified + times.rtt / 2)
            begun.append(max(sent[-1], verdicts[-depth] if len(verdicts) >= depth else 0.0))
            sent.append(begun[-1] + (k + 1) * times.draft)
        now, last = verdicts[m], bisect.bisect_left(begun, verdicts[m]) - 1  # the last draft begun before the verdict
        bonus = begun[last] + times.draft
        yield now if now >= sent[last] else bonus if now < bonus else sent[last]


def _coarse(times: Times) -> Times:
    """Rounds times to powers of 1.1, so that nearly equal times share a cached result."""
    return Times(*(0.0 if t < 1e-6 else 1.1 ** round(math.log(t, 1.1)) for t in (times.draft, times.verify, times.rtt)))

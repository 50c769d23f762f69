"""What drafts gain and cost, measured by a process's requests: acceptance by position and source, times as lines."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from operator import mul

from tandem.speculation.types import Draft, Proposer, Verdict

PRIOR = {Proposer.MODEL: 0.7, Proposer.NGRAM: 0.7}  # acceptance of a draft token, before any data
# Acceptance of a copy before any data, by the length of its match (5: or more)
PRIOR_COPIES = {1: 0.2, 2: 0.4, 3: 0.55, 4: 0.64, 5: 0.84}
PRIOR_AHEAD = 0.6  # prior acceptance of a token drafted ahead
PROCESS_FADING, REQUEST_FADING = 0.998, 0.96  # decay of acceptance counts per draft
TOGETHER, EACH = 6.0, 20.0  # weight of the prior, in trials: over all positions, and at each
LOWEST, HIGHEST = 0.02, 0.99  # bounds of acceptance
# Decay per step of co-batched rows and tokens, and of a row's committed tokens; smoothing of times
SHARE_FADING, COMMITTED_FADING, SMOOTHING = 0.8, 0.97, 0.2
# Steps kept of a size; fewer use the lower quartile; steps between fits; most sizes
KEPT, FEW, REFRESH, MOST_SIZES = 64, 8, 4, 256
PRIOR_STEPS = 4.0  # weight of the assumed slope, in steps
PRIOR_LINE = 16.0  # weight of the line at a size whose steps have a median, in steps
TRIAL_SHARE = 0.01  # share of the steps' time for drafts that may not pay
LEAST_GAIN = 1.03  # expected speedup that drafts need, of a row alone
FIRST_ALONE, MOST_ALONE = 32, 512  # slowed steps until undisturbed ones are measured again: doubled each time
WIDEST = 16  # tokens of a row; wider ones are chunks of prompts, whose tokens cost less


class AcceptanceRates:
    """Conditional acceptance by position. `prior`: one rate, or the estimate of other requests."""

    def __init__(self, prior: float | AcceptanceRates, fading: float) -> None:
        self._prior, self._fading = prior, fading
        self._counts: tuple[tuple[float, float], ...] = ()  # (trials, hits) by position; other threads read it
        # The last rates, of `most` positions, a prior and counts; undrafted rounds change none of them
        self._made: tuple[int, object, object, list[float]] = (0, None, None, [])

    def note(self, drafted: int, accepted: int) -> None:
        """Records a draft; tokens after the first rejected one are no trials."""
        fade, found = self._fading, list[tuple[float, float]]()
        counts = itertools.chain(self._counts, itertools.repeat((0.0, 0.0)))
        for i, (trials, hits) in zip(range(max(drafted, len(self._counts))), counts, strict=False):
            tried = i < min(drafted, accepted + 1)
            found.append((fade * trials + tried, fade * hits + (tried and i < accepted)))
        self._counts = tuple(found)

    def rates(self, most: int) -> list[float]:
        """Returns the acceptance of the first `most` positions, each given that all before were accepted."""
        counts, given = self._counts, self._prior
        known = given if isinstance(given, float) else given.rates(most)
        if (made := self._made)[0] == most and made[1] is known and made[2] is counts:
            return made[3]
        prior = [known] * most if isinstance(known, float) else known
        excess = sum(hits - trials * rate for (trials, hits), rate in zip(counts, prior, strict=False))
        shift = excess / (sum(trials for trials, _ in counts) + TOGETHER)
        found = [min(HIGHEST, max(LOWEST, rate + shift)) for rate in prior]
        for i, (trials, hits) in enumerate(counts[:most]):
            found[i] = (hits + EACH * found[i]) / (trials + EACH)
        self._made = most, known, counts, found
        return found


def expected_by_length(rates: Sequence[float]) -> list[float]:
    """Returns the expected tokens of a round by draft length from 0, the target's own included."""
    return [1.0, *(1.0 + sum_ for sum_ in itertools.accumulate(itertools.accumulate(rates, mul)))]


def best_length(
    tokens: Sequence[float], seconds: Sequence[float], co_batched: float = 0.0, least_gain: float = LEAST_GAIN
) -> int:
    """Returns the draft length with most tokens per second, given tokens[n] and seconds[n] of a round of n drafts."""
    rates = [(t + co_batched) / max(s, 1e-9) for t, s in zip(tokens, seconds, strict=False)]
    best = rates.index(max(rates))
    least = 1.0 + (least_gain - 1.0) * tokens[0] / (tokens[0] + co_batched)  # a row's own share of the step
    return best if rates[best] > least * rates[0] else 0


class Line:
    """Seconds of steps by size: medians, and the line fitted to them; its slope is assumed until sizes differ."""

    def __init__(self, growing_share: float) -> None:
        self._growing_share = growing_share
        self._seconds: dict[float, deque[float]] = {}
        self._points: dict[float, tuple[int, float]] = {}  # steps and their median by size, as the sums have them
        self._stale: set[float] = set()
        self._sums = [0.0] * 5  # of weights, sizes, seconds, squared sizes, sizes by seconds
        self._steps = 0
        self._fit = (0.0, 0.0)
        self.fixed_share = 1.0  # share of a mean step that does not grow with size

    @property
    def known(self) -> bool:
        return self._steps > 0

    def note(self, size: float, seconds: float) -> None:
        if self._steps == 1:  # the first step of a process takes longer than those after it
            self._stale.update(self._seconds)
            self._seconds.clear()
        self._seconds.setdefault(size, deque(maxlen=KEPT)).append(seconds)
        self._stale.add(size)
        if len(self._seconds) > MOST_SIZES:
            oldest = next(iter(self._seconds))
            del self._seconds[oldest]
            self._stale.add(oldest)
        self._steps += 1
        if self._steps <= FEW or self._steps % REFRESH == 0:
            self._refit()

    def _refit(self) -> None:
        for size in self._stale:
            self._add(size, -1.0)
            if all_ := self._seconds.get(size):
                self._points[size] = len(all_), _middle(all_)
                self._add(size, 1.0)
            else:
                self._points.pop(size, None)
        self._stale.clear()
        total, sizes, seconds, squares, products = self._sums
        x, y = sizes / total, seconds / total
        together, spread = products - sizes * y, max(0.0, squares - sizes * x)
        expected = self._growing_share * y / x if x else 0.0
        slope = max(0.0, (together + PRIOR_STEPS * expected) / (spread + PRIOR_STEPS))
        self._fit = max(0.0, y - slope * x), slope
        self.fixed_share = min(1.0, self._fit[0] / y) if y else 1.0

    def _add(self, size: float, sign: float) -> None:
        count, middle = self._points.get(size, (0, 0.0))
        of_size = (count, count * size, count * middle, count * size * size, count * size * middle)
        self._sums = [sum_ + sign * part for sum_, part in zip(self._sums, of_size, strict=True)]

    @property
    def slope(self) -> float:
        return self._fit[1]

    def at(self, size: float) -> float:
        below = math.floor(size)
        share = size - below
        return self._at(below) if not share else (1 - share) * self._at(below) + share * self._at(below + 1)

    def _at(self, size: int) -> float:
        fixed, slope = self._fit
        steps, middle = self._points.get(size, (0, 0.0))
        return (steps * middle + PRIOR_LINE * (fixed + slope * size)) / (steps + PRIOR_LINE)


def _middle(seconds: Collection[float]) -> float:
    # Disturbances only lengthen steps: of few, the lower quartile
    return sorted(seconds)[(len(seconds) - 1) // (4 if len(seconds) < FEW else 2)]


def _smoothed(before: float, value: float) -> float:
    return value if math.isnan(before) else before + SMOOTHING * (value - before)


class Estimate:
    """Measurements that all requests to a target share."""

    def __init__(self) -> None:
        # Acceptance of waited-for drafts; of copies, used or not, by the length of their match
        self.acceptance = {source: AcceptanceRates(rate, PROCESS_FADING) for source, rate in PRIOR.items()}
        self.continued = AcceptanceRates(HIGHEST, PROCESS_FADING)  # of a model's draft going on to a position
        self.copies = {size: AcceptanceRates(rate, PROCESS_FADING) for size, rate in PRIOR_COPIES.items()}
        self.ahead = AcceptanceRates(PRIOR_AHEAD, PROCESS_FADING)  # of a token drafted ahead
        # Seconds by the step's tokens; by draft tokens; by whether a model drafted
        self.target, self.draft, self.rest = Line(0.1), Line(1.0), Line(0.0)
        # Seconds of a target's steps while no request drafts ahead: where cores are shared, drafting slows steps
        self.alone, self.alone_from = Line(0.1), 0.0  # from this time on no step is slowed
        self.alone_due, self.alone_every = 0, FIRST_ALONE  # slowed steps until these are measured again, and between
        # Seconds gained by drafts ahead that were expected to pay, that trials of others may cost, and that one does
        self.gained = self.credit = self.trial = 0.0
        self.rows, self.others, self.committed = 0.0, 0.0, 1.0  # co-batched rows, their tokens; a row's committed ones
        self.rounds, self.rested, self._ended = 0, 0, 0.0  # rested: requests that began without drafts ahead
        # Seconds of a remote pair: of a draft token, of a verification with its queue, and of a round trip
        self.draft_token = self.verification = self.rtt = math.nan

    def observe(self, draft: Draft, verdict: Verdict, seconds: float) -> None:
        """Records a round that waited for its draft."""
        self.rounds += 1
        drafted = len(draft.token_ids)
        self.stepped(drafted + 1, verdict, self.target, *(() if drafted else (self.alone,)))
        modelled = drafted > 0 and source_of(draft) is Proposer.MODEL
        if modelled:
            self.draft.note(drafted, draft.compute_seconds / draft.rows)
        waited = draft.queue_seconds + verdict.queue_seconds
        self.rest.note(modelled, max(0.0, seconds - waited - draft.compute_seconds - verdict.compute_seconds))
        if drafted:
            note_draft(self.acceptance, self.continued, draft, verdict.accepted)

    def stepped(self, tokens: int, verdict: Verdict, *times: Line) -> None:
        """Records a target step in which this row had `tokens` tokens; its seconds in each of `times`."""
        whole = verdict.step_tokens or verdict.rows * max(verdict.width, tokens)
        self.rows += (1 - SHARE_FADING) * (verdict.rows - 1 - self.rows)
        self.others += (1 - SHARE_FADING) * (whole - tokens - self.others)
        self.committed += (1 - COMMITTED_FADING) * (len(verdict.token_ids) - self.committed)
        again = verdict.ended == self._ended != 0.0  # another row of the step that was noted last
        if times and not again and verdict.compute_seconds > 0 and verdict.width <= max(tokens, WIDEST):
            for line in times:
                line.note(whole, verdict.compute_seconds)
            self._ended = verdict.ended

    def drafted(self, tokens: int, seconds: float) -> None:
        if tokens:
            self.draft_token = _smoothed(self.draft_token, seconds / tokens)

    def verified(self, verify_seconds: float, network_seconds: float | None) -> None:
        """Records a remote verification: seconds at the target, and of the network if known."""
        self.verification = _smoothed(self.verification, verify_seconds)
        if network_seconds is not None:
            self.travelled(network_seconds)

    def travelled(self, network_seconds: float) -> None:
        self.rtt = _smoothed(self.rtt, network_seconds)

    @property
    def timed(self) -> bool:
        """Whether all times of a remote pair are measured."""
        return not math.isnan(self.draft_token + self.verification + self.rtt)

    def waiting_pays(self, most: int) -> bool:
        """Whether rounds that wait for at most `most` tokens of a model likely beat plain steps that wait for none."""
        tokens = expected_by_length(self.acceptance[Proposer.MODEL].rates(most))
        costs = [self.alone.at(self.others + 1), *self.rounds_with(Proposer.MODEL, range(1, most + 1))]
        return best_length(tokens, costs, self.rows * self.committed) > 0

    def rounds_with(self, source: Proposer, drafted: Iterable[float]) -> list[float]:
        """Returns the seconds of rounds that wait for each of these numbers of draft tokens of `source`."""
        model = source is Proposer.MODEL
        rest = self.rest.at(model)
        return [self.target.at(self.others + 1 + n) + rest + model * self.draft.at(n) for n in drafted]

    def steps(self, most: int) -> list[float]:
        """Returns the seconds of target steps that verify 0 to `most` draft tokens of a row."""
        return [self.target.at(self.others + 1 + n) for n in range(most + 1)]


def note_draft(rates: dict[Proposer, AcceptanceRates], continued: AcceptanceRates, draft: Draft, accepted: int) -> None:
    """Records a verified draft; the token that a draft in doubt did not go on to counts as not accepted."""
    source, drafted = source_of(draft), len(draft.token_ids)
    rates[source].note(drafted + draft.doubted, accepted)
    if source is Proposer.MODEL:
        continued.note(drafted + draft.doubted, drafted)


def source_of(draft: Draft) -> Proposer:
    return draft.proposed_by[0] if draft.proposed_by else Proposer.MODEL

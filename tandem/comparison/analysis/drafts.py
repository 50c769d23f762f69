"""Sums up what was drafted and accepted in the requests that predictions start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.comparison.analysis.metrics import sum_positions
from tandem.comparison.measuring.calibration import Calibration
from tandem.comparison.measuring.distributions import ratio
from tandem.comparison.measuring.records import Measurement
from tandem.speculation import theory
from tandem.speculation.types import rounds_by_length


@dataclass(frozen=True, slots=True)
class Drafted:
    """The acceptance of an architecture's drafts in the base, over all rounds, also those without a draft.

    rates[i]: P(draft token i accepted | all before it accepted). by_prompt: rounds and accepted tokens of every prompt.
    tokens: mean output length. rounds_by_length[n]: the rounds that verified n draft tokens.
    """

    rates: tuple[float, ...]
    by_prompt: tuple[tuple[int, int], ...]
    tokens: float
    rounds_by_length: tuple[int, ...] = ()

    @property
    def per_round(self) -> float:
        return theory.expected_tokens_measured(self.rates)


def drafted(by_prompt: Mapping[str, Sequence[Measurement]]) -> Drafted:
    every = [m for ms in by_prompt.values() for m in ms]
    accepted = sum_positions(m.accepted_per_position for m in every)
    rounds = sum(m.rounds for m in every)
    reached = [rounds, *accepted]
    return Drafted(
        tuple(a / r if r else 0.0 for a, r in zip(accepted, reached, strict=False)),
        tuple((sum(m.rounds for m in ms), sum(m.accepted for m in ms)) for ms in by_prompt.values()),
        sum(m.output_tokens for m in every) / len(every),
        tuple(rounds_by_length(rounds, sum_positions(m.drafted_per_position for m in every))),
    )


def rates_at_fixed(found: Sequence[Calibration]) -> tuple[float, ...]:
    """Returns rates, as `Drafted` has them, of calibration requests; at a position, of those that asked for as many."""
    rates, reached = list[float](), 1.0
    for position in range(max((one.length for one in found), default=0)):
        asked = [one.measurement for one in found if one.length > position]
        accepted = sum(sum(m.accepted_per_position[position : position + 1]) for m in asked)
        share = min(reached, ratio(accepted, sum(m.rounds for m in asked)) or 0.0)
        rates.append(share / reached if reached else 0.0)
        reached = share
    return tuple(rates)


@dataclass(frozen=True, slots=True)
class Copied:
    """The rounds of lookup alone in the base: tokens committed in one, and draft tokens that it verifies."""

    tokens: float
    drafted: float


def copied(found: Sequence[Measurement]) -> Copied | None:
    """Returns what lookup alone did in these requests; None without a round."""
    rounds = sum(m.rounds for m in found)
    if not rounds:
        return None
    return Copied(1 + sum(m.accepted for m in found) / rounds, sum(m.drafted for m in found) / rounds)

"""Step times of target and draft on this machine: medians of repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tandem.runners.protocol import PrefillRow, ProposeRow, Runner, VerifyRow
from tandem.speculation.types import Request


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Seconds. verify[k]: a target step over k draft tokens; 0 is plain decoding.

    propose[k]: k draft tokens; empty without a draft model.
    """

    verify: Mapping[int, float]
    propose: Mapping[int, float]

    @property
    def draft_step(self) -> float | None:
        """Seconds of a further draft token: the slope over lengths, or the only step."""
        if not self.propose:
            return None
        first, last = min(self.propose), max(self.propose)
        rise = self.propose[last] - self.propose[first]
        return rise / (last - first) if last > first else self.propose[first] / first

    @property
    def ratio(self) -> float | None:
        """A draft step over a plain target step; None without a draft or if the step took no time."""
        return None if self.draft_step is None or not self.verify[0] else self.draft_step / self.verify[0]


def measure_costs(
    models: tuple[Runner, Runner | None],
    adapters: tuple[int, int],
    request: Request,
    longest: int,
    context: int,
    repeats: int,
) -> PairCosts:
    """Times steps of a sequence of `context` tokens in slot 0. `models`, `adapters`: of target and draft."""
    (target, draft), (of_target, of_draft) = models, adapters
    tokens = tuple(i % target.limits.vocab_size for i in range(context))
    steps: dict[tuple[str, int], Callable[[], object]] = {}
    _prefill(target, tokens, of_target)
    for k in range(longest + 1):
        row = VerifyRow(0, context - 1, tokens[-1], tokens[:k], request, adapter=of_target)
        steps["verify", k] = partial(target.verify, [row])
    if draft:
        _prefill(draft, tokens, of_draft)
        for k in range(1, longest + 1):
            drafted = ProposeRow(0, context - 1, tokens[-2:], k, request, adapter=of_draft)
            steps["propose", k] = partial(draft.propose, [drafted])
    taken = _in_turn(steps, repeats)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    return PairCosts(*({k: s for (kind, k), s in seconds.items() if kind == name} for name in ("verify", "propose")))


def _prefill(runner: Runner, tokens: tuple[int, ...], adapter: int) -> None:
    chunk = runner.limits.chunk
    for start in range(0, len(tokens) - 1, chunk):
        runner.prefill([PrefillRow(0, start, tokens[start : min(start + chunk, len(tokens) - 1)], adapter)])


def _in_turn(steps: Mapping[tuple[str, int], Callable[[], object]], repeats: int) -> dict[tuple[str, int], list[float]]:
    # In turn, so that a busy moment of the machine affects all kinds.
    taken: dict[tuple[str, int], list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - started)
    return taken

"""Step times of target and draft on this machine: medians of repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.engine.batcher import Batcher
from tandem.runners.protocol import PrefillRow, ProposeRow, Runner, VerifyRow
from tandem.speculation.types import Request, SamplingParams


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


async def measure_costs(
    target: Runner,
    draft: Runner | None,
    batcher: Batcher,
    sampling: SamplingParams,
    longest: int,
    context: int,
    repeats: int,
    adapters: tuple[int, int] = (0, 0),
) -> PairCosts:
    """Times steps of a sequence of `context` tokens in slot 0, on `batcher`'s device thread.

    `adapters`: numbers of the target's and the draft's.
    """
    return await batcher.on_device(_measure, target, draft, sampling, longest, context, repeats, adapters)


def _measure(
    target: Runner,
    draft: Runner | None,
    sampling: SamplingParams,
    longest: int,
    context: int,
    repeats: int,
    adapters: tuple[int, int],
) -> PairCosts:
    (verifies, drafted), request = adapters, Request(sampling)
    tokens = tuple(i % target.limits.vocab_size for i in range(context))
    steps: dict[int, Callable[[], object]] = {
        k: _verify_step(target, VerifyRow(0, context - 1, tokens[-1], tokens[:k], request, adapter=verifies))
        for k in range(longest + 1)
    }
    _prefill(target, tokens, verifies)
    drafts: dict[int, Callable[[], object]] = {}
    if draft:
        _prefill(draft, tokens, drafted)
        drafts = {
            k: _propose_step(draft, ProposeRow(0, context - 1, tokens[-2:], k, request, adapter=drafted))
            for k in range(1, longest + 1)
        }
    named = {**{("verify", k): step for k, step in steps.items()}, **{("propose", k): s for k, s in drafts.items()}}
    taken = _in_turn(named, repeats)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    return PairCosts({k: seconds["verify", k] for k in steps}, {k: seconds["propose", k] for k in drafts})


def _prefill(runner: Runner, tokens: tuple[int, ...], adapter: int) -> None:
    chunk = runner.limits.chunk
    for start in range(0, len(tokens) - 1, chunk):
        runner.prefill([PrefillRow(0, start, tokens[start : min(start + chunk, len(tokens) - 1)], adapter)])


def _verify_step(runner: Runner, row: VerifyRow) -> Callable[[], object]:
    return lambda: runner.verify([row])


def _propose_step(runner: Runner, row: ProposeRow) -> Callable[[], object]:
    return lambda: runner.propose([row])


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

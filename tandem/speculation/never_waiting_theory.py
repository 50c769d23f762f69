"""Predicts the time per token at a verifier that never waits: a formula, and a simulation on ranks that were measured.

The target streams what it commits, and steps on. A draft that is made from an arrival comes R + T_d after it was sent,
where R is the round trip and T_d the time of drafting: s = ceil((R + T_d) / t_1) plain steps later. So after a token
that the drafter missed, the target steps plainly until s tokens in succession were the drafter's choice, which takes
N = (1 - a^s) / ((1 - a) a^s) steps of a token each. From then on every step verifies k draft tokens until one is
missed: 1 / (1 - a^(k+1)) steps, which commit 1 / (1 - a) tokens. The formula is the ratio of the two sums.

It assumes the same acceptance at every position, and drafts that are long enough. Tests compare it with the simulation.
A rank is the place of the target's token in the draft's order: 0 is its first choice. Times are in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tandem.speculation.theory import check_acceptance

Path = tuple[int, ...]
"""A path in a tree of drafts, as the rank of each of its tokens."""

MIN_STEP, MOST_STEPS = 1e-9, 1e9
"""Seconds of the shortest step, since what took no measurable time took some, and steps that are as good as endless."""
_REMEMBERED = 4
"""Trees that the simulated verifier holds."""


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Seconds of a draft step, of a target step by its tokens, of a round trip, and of each node of a tree."""

    draft: float
    step: Callable[[int], float]
    rtt: float
    node: float = 0.0


def steps_late(costs: RunCosts, fresh: int) -> int:
    """Returns s, the plain steps that the target makes while `fresh` draft tokens are made and travel; at least 1."""
    steps = (costs.rtt + fresh * costs.draft) / max(costs.step(1), MIN_STEP) - 1e-9
    return max(1, math.ceil(min(steps, MOST_STEPS)))


def plain_steps(acceptance: float, late: int) -> float:
    """Returns N, the expected steps of a token each until `late` in succession were the drafter's choice."""
    if acceptance >= 1:
        return float(late)
    reached = acceptance**late  # may be so near 0 that a product with it is 0
    return math.inf if reached <= 0 else (1 / reached - 1) / (1 - acceptance)


def tpot_never_waiting(costs: RunCosts, acceptance: float, length: int, fresh: int | None = None) -> float:
    """Returns the seconds per token if a step verifies at most `length` draft tokens.

    `fresh`: tokens that are drafted before the first are sent (None: `length` beyond those committed meanwhile).
    """
    check_acceptance(acceptance)
    if fresh is None:
        fresh = length + steps_late(costs, length)
    plain = plain_steps(acceptance, steps_late(costs, fresh))
    if math.isinf(plain) or length < 1:
        return costs.step(1)
    if acceptance >= 1:
        return costs.step(length + 1) / (length + 1)
    drafted = 1 / (1 - acceptance ** (length + 1))
    return (plain * costs.step(1) + drafted * costs.step(length + 1)) / (plain + 1 / (1 - acceptance))


def chain(length: int) -> list[Path]:
    """Returns the paths of a draft without branches: first choices only."""
    return [(0,) * n for n in range(1, length + 1)]


def likeliest_tree(chances: Sequence[float], nodes: int, depth: int) -> list[Path]:
    """Returns the likeliest paths, best first, if a token has rank r with chance `chances[r]` anywhere."""
    heap: list[tuple[float, Path]] = [(-chance, (rank,)) for rank, chance in enumerate(chances)]
    heapq.heapify(heap)
    found: list[Path] = []
    while heap and len(found) < nodes:
        likely, path = heapq.heappop(heap)
        found.append(path)
        if len(path) < depth:
            for rank, chance in enumerate(chances):
                heapq.heappush(heap, (likely * chance, (*path, rank)))
    return found


def accepted(ranks: Sequence[int], start: int, tree: Collection[Path], path: Path = ()) -> int:
    """Returns how many tokens from `start` on a tree covers, after the tokens of `path`."""
    count = 0
    while start + count < len(ranks):
        path = (*path, ranks[start + count])
        if path not in tree:
            break
        count += 1
    return count


def simulate_stop_and_wait(sequences: Sequence[Sequence[int]], costs: RunCosts, tree: Sequence[Path]) -> float:
    """Returns the seconds per token of rounds that each wait for a whole tree; without a round trip, of fused ones."""
    depth, nodes = max(map(len, tree)), set(tree)
    round_seconds = depth * costs.draft + costs.rtt + costs.step(len(tree) + 1)
    rounds = 0
    for ranks in sequences:
        at = 0
        while at < len(ranks):
            at += accepted(ranks, at, nodes) + 1
            rounds += 1
    return rounds * round_seconds / sum(map(len, sequences))


def simulate_never_waiting(
    sequences: Sequence[Sequence[int]],
    costs: RunCosts,
    tree: Sequence[Path],
    width: int,
    chances: Sequence[float] = (1.0,),
    extends: bool = False,
    prepared: bool = True,
) -> float:
    """Returns the seconds per token of a verifier that never waits, whose steps verify at most `width` draft tokens.

    From each arrival the client drafts the whole `tree`; if it `extends`, only what an earlier draft that still fits
    does not hold. `chances`: those of the ranks, by which a step chooses the `width` likeliest nodes. `prepared`: the
    verifier holds a tree for the first token; if not, that is drafted while the first step is made.
    """
    simulation = _Simulation(costs, tree, width, chances, extends, prepared)
    return sum(map(simulation.seconds, sequences)) / sum(map(len, sequences))


class _Simulation:
    """One client and its verifier, step by step; see `simulate_never_waiting`."""

    def __init__(
        self,
        costs: RunCosts,
        tree: Sequence[Path],
        width: int,
        chances: Sequence[float],
        extends: bool,
        prepared: bool,
    ) -> None:
        self._costs, self._width, self._extends, self._prepared = costs, width, extends, prepared
        self._tree, self._by_length = set(tree), sorted(tree, key=len)
        self._depth = max(map(len, tree))
        self._likelihood = {path: math.prod(chances[rank] for rank in path) for path in tree}
        self._nodes_seconds = costs.node * len(tree) if len(chances) > 1 else 0.0

    def seconds(self, ranks: Sequence[int]) -> float:
        now, at, drafted = 0.0, 0, 0
        client_free = 0.0 if self._prepared else self._depth * self._costs.draft + self._nodes_seconds
        held, coming = list[int](), [(client_free, 0)]
        while at < len(ranks):
            while coming and coming[0][0] <= now:
                held.append(coming.pop(0)[1])
            count, tokens = self._step(ranks, at, held)
            now += self._costs.step(tokens)
            at += count
            client_free = max(now + self._costs.rtt / 2, client_free) + self._drafting(ranks, drafted, at)
            arrives = client_free + self._costs.rtt / 2
            drafted = at
            coming = [one for one in coming if one[0] <= arrives] + [(arrives, at)]
            held = held[-_REMEMBERED:]
        return now

    def _drafting(self, ranks: Sequence[int], before: int, at: int) -> float:
        """Returns the seconds of drafting from `at`, where the draft before began at `before`."""
        fits = self._extends and tuple(ranks[before:at]) in self._tree
        missing = min(self._depth, at - before) if fits else self._depth
        return missing * self._costs.draft + self._nodes_seconds

    def _step(self, ranks: Sequence[int], at: int, held: Sequence[int]) -> tuple[int, int]:
        """Returns the tokens that a step at `at` commits, and those that it computes, with the newest fitting tree."""
        for base in reversed(held):
            path = tuple(ranks[base:at])
            if base == at or path in self._tree:
                beyond = [p for p in self._by_length if len(p) > len(path) and p[: len(path)] == path]
                chosen = sorted(beyond, key=self._likelihood.__getitem__, reverse=True)[: self._width]
                return accepted(ranks, at, set(chosen), path) + 1, len(chosen) + 1
        return 1, 1

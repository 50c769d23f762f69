"""Simulates a verifier that never waits, and rounds that wait, on ranks that were measured.

A rank is the place of the target's token in the draft's order: 0 is its first choice, the token that it drafts. Times
are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.speculation.never_waiting_theory import RunCosts

_REMEMBERED = 4
"""Drafts that the simulated verifier holds."""


def accepted(ranks: Sequence[int], start: int, most: int) -> int:
    """Returns how many of the next `most` tokens from `start` on the drafter's first choices cover."""
    hits = ranks[start : start + most]
    return next((i for i, rank in enumerate(hits) if rank), len(hits))


def simulate_stop_and_wait(sequences: Sequence[Sequence[int]], costs: RunCosts, k: int) -> float:
    """Returns the seconds per token of rounds that each wait for `k` drafts; without a round trip, of fused ones."""
    rounds = 0
    for ranks in sequences:
        at = 0
        while at < len(ranks):
            at += accepted(ranks, at, k) + 1
            rounds += 1
    return rounds * (k * costs.draft + costs.rtt + costs.step(k + 1)) / sum(map(len, sequences))


def simulate_never_waiting(
    sequences: Sequence[Sequence[int]],
    costs: RunCosts,
    depth: int,
    width: int,
    extends: bool = False,
    prepared: bool = True,
) -> float:
    """Returns the seconds per token of a verifier that never waits, whose steps verify at most `width` draft tokens.

    From each arrival the client drafts `depth` tokens; if it `extends`, only what an earlier draft that still fits does
    not hold. `prepared`: the verifier holds a draft for the first token; if not, that is drafted while the first step
    is made.
    """
    total = sum(_seconds(ranks, costs, depth, width, extends, prepared) for ranks in sequences)
    return total / sum(map(len, sequences))


def _seconds(ranks: Sequence[int], costs: RunCosts, depth: int, width: int, extends: bool, prepared: bool) -> float:
    """Returns the seconds of one sequence, step by step."""

    def fits(base: int, at: int) -> bool:
        """Returns whether a draft made from `base` tokens agrees with those committed up to `at`, and reaches `at`."""
        return at - base <= depth and not any(ranks[base:at])

    now, at, drafted = 0.0, 0, 0
    client_free = 0.0 if prepared else depth * costs.draft
    held, coming = list[int](), [(client_free, 0)]
    while at < len(ranks):
        while coming and coming[0][0] <= now:
            held.append(coming.pop(0)[1])
        base = next((base for base in reversed(held) if fits(base, at)), None)
        verified = 0 if base is None else min(width, depth - (at - base))
        now += costs.step(verified + 1)
        at += accepted(ranks, at, verified) + 1
        missing = min(depth, at - drafted) if extends and fits(drafted, at) and at > drafted else depth
        client_free = max(now + costs.rtt / 2, client_free) + missing * costs.draft
        arrives = client_free + costs.rtt / 2
        drafted = at
        coming = [one for one in coming if one[0] <= arrives] + [(arrives, at)]
        held = held[-_REMEMBERED:]
    return now

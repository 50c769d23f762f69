"""The pipelined loop against a simulated target in virtual time: tokens, counts, and the time that theory says."""

from __future__ import annotations

import asyncio

import pytest

from speculation.depth import Times, expected_tpot
from speculation.pipeline import OutOfStep
from speculation.theory import StepCosts, tpot_pipelined
from tests.speculation.simulated import SimulatedDraft, SimulatedTarget, fixed_depth, generate, said
from tests.speculation.virtual_time import in_virtual_time


def run(depth: int, k: int, acceptance: float = 0.7, count: int = 120, draft_s: float = 0.001, **target):
    return in_virtual_time(
        generate(SimulatedTarget(**target), SimulatedDraft(acceptance, draft_s), fixed_depth(depth), k, count)
    )


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 3, 8])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_tokens_are_the_targets_whatever_the_depth_the_length_and_the_draft(k: int, depth: int, acceptance: float):
    for rtt, verify in ((0.0, 0.0), (0.05, 0.01), (0.001, 0.03)):
        found = run(depth, k, acceptance, rtt=rtt, verify_seconds=verify)
        assert found.tokens == said(120)
        assert found.target.longest <= 3 + 120
        assert found.stats.max_in_flight <= depth

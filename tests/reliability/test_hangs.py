"""A verifier that hangs, with another listed: how long clients wait for it, as a campaign; one case always."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from tests.reliability import figures
from tests.reliability.hangs import CASES, measure, seconds_to_go_on


def test_a_process_that_is_stopped_is_left_in_the_middle_of_a_request() -> None:
    """That it is, with the right tokens; how soon is the campaign's to say."""
    (case,) = [c for c in CASES if str(c) == "stopped, in a request, 9 s, pipeline auto"]
    asyncio.run(seconds_to_go_on(case))


@pytest.mark.campaign
@pytest.mark.timeout(280)
def test_clients_go_on_within_a_third_of_the_deadline_or_five_seconds() -> None:
    found = asyncio.run(measure(CASES, runs=3, at_once=4))
    figures.note("hangs", **{str(case): round(max(seconds), 2) for case, seconds in found.items()})
    missed = [f"{case}: {seconds}" for case, seconds in found.items() if statistics.median(seconds) > case.allowed]
    assert not missed, "\n".join(missed)

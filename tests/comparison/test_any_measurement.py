"""Whatever was measured, in whatever number: analysis, decision, page and terminal finish and say what they can."""

from __future__ import annotations

import io
import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tandem.comparison.analysis.comparison import Comparison, analyse, comparison_as_text
from tandem.comparison.measuring.json_form import decoded
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.report.page import html
from tandem.comparison.report.printed import print_comparison
from tandem.speculation.types import Rule
from tests.comparison.made_up import NAMES, POOLS, SHAPES, Shape, measured

UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""A smaller seed is no simpler case, and looking for one takes minutes."""


def said(of: RunData) -> str:
    """Everything that is said; fails where anything could not be made."""
    found = decoded(Comparison, json.loads(comparison_as_text(analyse(of))))
    screen = Console(width=130, file=io.StringIO(), color_system=None)
    print_comparison(found, screen)
    assert isinstance(screen.file, io.StringIO)
    texts = [screen.file.getvalue(), html(found)]
    for rtt in (0.0, 13.0, 500.0):
        for clients in (1, 100):
            if verdict := found.decide(rtt, clients):
                texts.append(verdict.sentence)
                assert verdict.ratio is None or verdict.ratio >= 0
    text = "\n".join(texts)
    assert "could not be" not in text
    assert not any(bad in text for bad in (" nan ", " inf ", "-inf"))
    return text


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.thorough)])
def test_any_times_in_any_number_are_analysed_and_said(count: int) -> None:
    @given(shape=SHAPES, times=POOLS, seed=st.integers(0, 2**32))
    @settings(max_examples=count, deadline=None, phases=UNSHRUNK, suppress_health_check=[HealthCheck.too_slow])
    def test(shape: Shape, times: list[float], seed: int) -> None:
        of = measured(shape, times, Random(seed), Path("nowhere"))
        text = said(of)
        assert ("PARTIAL: interrupted by SIGINT" in text) == (of.cut_short is not None)

    test()


BUSY = (0.001, 0.004, 0.009, 0.016, 0.25, 3.0)
WORST = {
    "one request": (Shape(prompts=1, keep=0.01), BUSY),
    "no time at all": (Shape(rtts=(0.0, 20.0)), (0.0,)),
    "next to no time": (Shape(NAMES[:5], 3, length=None, longest_answer=2, calibrated=0), (*[0.0] * 6, 5e-324)),
    "hours": (Shape(prompts=3, rtts=(0.0, 20.0)), (3e4, 1e5)),
    "everything failed": (Shape(failing=1.0), BUSY),
    "both rules": (Shape(temperatures=(0.0, 0.8), rules=(Rule.AGREEMENT, Rule.REJECTION)), (0.0, 0.01)),
    "loads": (Shape(prompts=3, concurrency=(1, 4, 8), rate=(0.5, 2.0), load_requests=9), BUSY),
    "loads cut short": (Shape(concurrency=(1, 8), load_requests=6, keep=0.5), BUSY),
    "nothing plain": (Shape(names=tuple(n for n in NAMES if not n.startswith("auto"))), BUSY),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WORST)
def test_the_worst_cases_are_said_and_drawn(name: str, tmp_path: Path) -> None:
    shape, times = WORST[name]
    said(measured(shape, times, Random(1), tmp_path))

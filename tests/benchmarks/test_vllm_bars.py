"""How the bars on vLLM are judged, and that a run goes on where another ended."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.vllm_bars import HUNG, IDENTITY, STEPS, TEXTS, TIMES, Kept, bars, timed
from benchmarks.vllm_drafts import NEVER_WAITING, OWN, PLAIN, WAITING, Timed, missing

SETTING = {"dtype": "float32"}


def test_a_run_goes_on_where_another_ended_and_refuses_other_settings(tmp_path: Path) -> None:
    path, asked = tmp_path / "bars.jsonl", Namespace(prompts_per_workload=1, rtt_ms=[20.0])
    kept = Kept(path, SETTING)
    every = missing(asked, [])
    first = every[0][1]
    names = (PLAIN, OWN, WAITING, NEVER_WAITING)
    kept.add(TIMES, *(asdict(Timed(0.0, name, first, (1,), 0.1)) for name in names))
    with path.open("a") as file:
        file.write('{"part": "times", "fo')  # killed while writing
    again = Kept(path, SETTING)
    assert timed(again) == timed(kept) and missing(asked, timed(again)) == every[1:]
    again.add(HUNG, {"form": WAITING, "seconds": []})
    assert Kept(path, SETTING).of(HUNG) == again.of(HUNG)
    with pytest.raises(ValueError, match="other settings"):
        Kept(path, {"dtype": "bfloat16"})


def test_bars_are_met_missed_or_not_measured(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "bars.jsonl", SETTING)
    assert {bar.verdict for bar in bars(kept, 30, 5)} == {"not measured"}
    for engine, seconds in ((PLAIN, 1.0), (OWN, 1.0), (WAITING, 1.2), (NEVER_WAITING, 0.9)):
        kept.add(TIMES, asdict(Timed(0.0, engine, "code/a", (1,), seconds)))
        kept.add(TIMES, asdict(Timed(100.0, engine, "code/a", (1,), seconds)))
    for engine in (PLAIN, WAITING, NEVER_WAITING):
        texts = [{"engine": engine, "prompt": str(n), "token_ids": [n]} for n in range(TEXTS)]
        texts[0]["token_ids"] = [7 if engine == WAITING else 0]
        kept.add(IDENTITY, *texts)
    kept.add(HUNG, {"form": WAITING, "seconds": [0.030] * STEPS})
    kept.add(HUNG, {"form": NEVER_WAITING, "seconds": [0.001] * (STEPS - 1)})
    found = [bar.verdict for bar in bars(kept, 30, 5)]
    assert found == ["missed", "met", *["not measured"] * 3, "missed", "met", "met", "not measured"]
    kept.add(HUNG, {"form": NEVER_WAITING, "seconds": [0.036]})
    assert bars(kept, 30, 5)[-1].verdict == "missed"

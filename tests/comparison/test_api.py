"""`compare` from Python, with real servers of the toy backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.comparison.analysis.comparison import read_comparison
from tandem.comparison.api import compare
from tandem.comparison.measuring.driver import Unreachable
from tandem.comparison.measuring.identity import TokenIdentity


def test_a_comparison_is_measured_written_and_returned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(
        ["one", "two"],
        output_dir=tmp_path,
        architectures=("autoregressive", "distributed", "fused"),
        backend="toy",
        draft="model",
        draft_model="miss=0.3",
        rtt_ms=(0.0, 8.0),
        max_new_tokens=8,
    )
    names = ["autoregressive", "distributed", "fused"]
    assert [summary.architecture for summary in found.base.summaries] == names
    assert len(found.records) == 12 and not found.failed and found.missing is None
    assert capsys.readouterr() == ("", "")
    assert [decision.condition for decision in found.decisions] == ["base", "RTT 8 ms"]
    lines = str(found).splitlines()
    assert lines[:2] == [f"{decision.sentence} ({decision.sureness})" for decision in found.decisions]
    assert [line.partition(":")[0] for line in lines[2:]] == names
    written = read_comparison(tmp_path / "comparison.json")
    assert len(written.records) == 12
    for measured, rtt in zip(written.conditions, (0.0, 0.008), strict=True):
        assert measured.overhead is not None and measured.overhead.link_p50_s >= rtt
        for summary in measured.summaries:
            assert summary.identical == TokenIdentity(2, 2, ())
    assert (tmp_path / "report.html").exists()


def test_without_a_folder_nothing_is_left_behind() -> None:
    found = compare(["one"], architectures=("autoregressive",), backend="toy", max_new_tokens=4)
    assert not found.config.output_dir.exists()


def test_what_cannot_be_measured_raises_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        compare(["one"], output_dir=tmp_path, max_tokens=4)
    with pytest.raises(ValueError, match="max-new-tokens: 0 is below 1"):
        compare(["one"], output_dir=tmp_path, max_new_tokens=0)
    with pytest.raises(Unreachable, match=r"127.0.0.1:9 does not answer: UNAVAILABLE: nothing listens at 127.0.0.1:9 "):
        compare(
            ["one"], output_dir=tmp_path, architectures=("autoregressive",), connect={"autoregressive": "127.0.0.1:9"}
        )

"""A whole comparison under load, with real servers of the toy backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli import compare
from tandem.comparison.analysis.comparison import Comparison, read_comparison
from tandem.comparison.measuring.identity import TokenIdentity

pytestmark = pytest.mark.thorough
NAMES = ["autoregressive", "lookup", "distributed", "never_waiting", "fused", "remote_draft"]
LOADS = ["concurrency 1", "concurrency 6", "rate 40/s"]
TOY = ("--backend", "toy", "--model", "step=0.002", "--draft", "model", "--draft-model", "miss=0.3,step=0.0005")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "run"
    arguments = [
        *TOY, "--prompt", "one and more", "--prompt", "two", "--max-new-tokens", "8", "--temperature", "0.7",
        "--concurrency", "1,6", "--rate", "40", "--max-num-completed-requests", "9",
        "--mean-input-tokens", "20", "--stddev-input-tokens", "5", "--mean-output-tokens", "10",
        "--output-dir", str(folder),
    ]  # fmt: skip
    assert compare.main(arguments) == 0
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Comparison:
    return read_comparison(folder / "comparison.json")


def test_every_architecture_answered_every_load_with_plain_decodings_tokens(found: Comparison) -> None:
    loaded = [measured for measured in found.conditions if measured.varies == "load"]
    assert [measured.name for measured in loaded] == LOADS
    for measured in loaded:
        assert [summary.architecture for summary in measured.summaries] == NAMES
        for of in measured.summaries:
            assert (of.requests, of.failed, of.identical) == (9, 0, TokenIdentity(9, 9, ()))
            outputs, inputs = (of.distributions[f"number_{side}_tokens"] for side in ("output", "input"))
            assert outputs.min == outputs.max == 10 and (inputs.min or 0) < (inputs.max or 0)


def test_every_load_is_decided_on_the_page(found: Comparison, folder: Path) -> None:
    assert [point.condition for point in found.loads] == LOADS
    page = (folder / "report.html").read_text().replace("\u00a0", " ")
    for point in found.loads:
        assert point.verdict is not None and point.verdict.sentence in page
    assert "Latency against throughput" in page


def test_requests_of_a_load_run_beside_each_other(found: Comparison) -> None:
    def most_at_once(condition: str) -> int:
        of = [r for r in found.records if (r.condition, r.architecture) == (condition, "fused")]
        return max(sum((o.sent_s or 0) <= (r.sent_s or 0) < (o.ended_s or 0) for o in of) for r in of)

    assert most_at_once("concurrency 1") == 1
    assert most_at_once("concurrency 6") == 6


def test_prompts_cannot_be_cut_without_the_targets_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rate", "1", "--mean-input-tokens", "9", "--model", str(tmp_path / "none"), "--output-dir"]
    assert compare.main([*arguments, str(tmp_path / "out")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "error: mean-input-tokens: " in line and "no such model folder" in line

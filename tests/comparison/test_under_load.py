"""A whole comparison under load, with real servers of the toy backend."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandem.cli import compare
from tandem.comparison.report import reading

pytestmark = pytest.mark.thorough
SCHEMA = json.loads((Path(reading.__file__).parent / "comparison.schema.json").read_text())
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
def found(folder: Path) -> dict[str, Any]:
    comparison: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    jsonschema.validate(comparison, SCHEMA)
    return comparison


def test_every_architecture_answered_every_load_with_plain_decodings_tokens(found: dict[str, Any]) -> None:
    loaded = [c for c in found["conditions"] if c["varies"] == "load"]
    assert [c["name"] for c in loaded] == LOADS
    for condition in loaded:
        assert list(condition["architectures"]) == NAMES
        for of in condition["architectures"].values():
            assert (of["requests"], of["failed"]) == (9, 0)
            assert of["identical_to_autoregressive"] == {"count": 9, "total": 9, "divergences": []}
            assert of["number_output_tokens"]["min"] == of["number_output_tokens"]["max"] == 10
            assert of["number_input_tokens"]["min"] < of["number_input_tokens"]["max"]


def test_all_architectures_were_asked_the_same(found: dict[str, Any]) -> None:
    inputs = {
        (r["condition"], r["architecture"]): [r["number_input_tokens"]]
        for r in found["records"]
        if r["sent_s"] is not None and r["prompt"] == "load/3"
    }
    assert len(inputs) == 3 * len(NAMES) and len({tuple(lengths) for lengths in inputs.values()}) == 1


def test_every_load_is_decided_and_said(found: dict[str, Any], folder: Path) -> None:
    points = found["under_load"]["points"]
    assert [point["condition"] for point in points] == LOADS
    for point in points:
        assert point["best"]["architecture"] in NAMES
        for of in point["architectures"].values():
            assert of["num_completed_requests_per_minute"] > 0 < of["mean_output_throughput_token_per_s"]
    page = (folder / "report.html").read_text().replace("\u00a0", " ")
    assert found["under_load"]["headline"] in page and "Latency against throughput under load" in page
    assert "20 ± 5 input tokens, 10 ± 0 output tokens, 9 requests each, arrivals of seed 0" in page
    assert (folder / "plots" / "latency-by-throughput.png").stat().st_size > 0


def test_loads_are_rows_with_llmperfs_names(folder: Path) -> None:
    with (folder / "loads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["condition"], row["architecture"]) for row in rows] == [
        (load, name) for load in LOADS for name in NAMES
    ]
    assert all(float(row["num_completed_requests_per_minute"]) > 0 for row in rows)
    assert all(float(row["ttft_s_p50"]) > 0 and row["number_errors"] == "0" for row in rows)


def test_requests_of_a_load_run_beside_each_other(found: dict[str, Any]) -> None:
    def most_at_once(condition: str) -> int:
        of = [r for r in found["records"] if (r["condition"], r["architecture"]) == (condition, "fused")]
        return max(sum(o["sent_s"] <= r["sent_s"] < o["ended_s"] for o in of) for r in of)

    assert most_at_once("concurrency 1") == 1
    assert most_at_once("concurrency 6") == 6


def test_the_records_alone_give_the_same_loads(folder: Path, found: dict[str, Any], tmp_path: Path) -> None:
    records = str(folder / "records.jsonl")
    assert compare.main(["--from-records", records, "--output-dir", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again" / "comparison.json").read_text())
    assert again["under_load"] == found["under_load"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "0"], "concurrency: 0 is not between 1 and 1000"),
        (["--concurrency", "1,1"], "concurrency: a value is named twice"),
        (["--concurrency", "x"], "concurrency: 'x' is not a list of numbers"),
        (["--rate", "0"], "rate: 0 is not above 0"),
        (["--rate", "nan"], "rate: nan is not above 0"),
        (["--mean-input-tokens", "9"], "mean-input-tokens: is for --concurrency and --rate, and neither is given"),
        (["--rate", "1", "--stddev-output-tokens", "3"], "stddev-output-tokens: is for --mean-output-tokens"),
        (["--rate", "1", "--mean-input-tokens", "9", "--stddev-input-tokens", "10"], "is not between 0 and the mean"),
        (["--rate", "1", "--mean-input-tokens", "500"], "500 and 64 new tokens exceed a sequence length of 512"),
        (["--rate", "1", "--mean-output-tokens", "0"], "mean-output-tokens: 0 is not between 1 and 511"),
        (["--rate", "1", "--max-num-completed-requests", "0"], "max-num-completed-requests: 0 is below 1"),
    ],
)
def test_a_load_that_cannot_be_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        compare.main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_prompts_cannot_be_cut_without_the_targets_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rate", "1", "--mean-input-tokens", "9", "--model", str(tmp_path / "none"), "--output-dir"]
    assert compare.main([*arguments, str(tmp_path / "out")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "error: mean-input-tokens: " in line and "no such model folder" in line

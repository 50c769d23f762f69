"""A whole comparison with real servers of the toy backend: links, sampling, loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cli import compare
from tandem.comparison.analysis.comparison import Comparison, read_comparison
from tandem.comparison.measuring.identity import TokenIdentity
from tandem.speculation.types import Rule

pytestmark = pytest.mark.thorough  # a smaller one daily: test_api.py
ARCHITECTURES = ["autoregressive", "distributed", "fused", "remote_draft", "pipelined"]
LOADS = ["concurrency 1", "concurrency 6", "rate 40/s"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one comparison wrote: two links, two temperatures, both rules, three loads."""
    folder = tmp_path_factory.mktemp("results") / "run"
    prompts = [argument for text in ("one and more", "two", "three") for argument in ("--prompt", text)]
    code = compare.main(
        [
            *("--backend", "toy", "--model", "step=0.004", "--draft-model", "miss=0.3,step=0.001", "--draft", "model"),
            *("--architectures", ",".join(ARCHITECTURES)),
            *("--rtt-ms", "0,12", "--temperature", "0,0.8", "--rule", "agreement,rejection"),
            *("--concurrency", "1,6", "--rate", "40", "--max-num-completed-requests", "9"),
            *("--mean-input-tokens", "20", "--stddev-input-tokens", "5", "--mean-output-tokens", "10"),
            *("--max-new-tokens", "12", "--output-dir", str(folder), *prompts),
        ]
    )
    assert code == 0
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Comparison:
    return read_comparison(folder / "comparison.json")


def test_every_condition_ran_every_architecture_and_tokens_are_plain_decodings_under_agreement(
    found: Comparison,
) -> None:
    names = ["base", "RTT 12 ms", "temperature 0.8, agreement", "temperature 0.8, rejection"]
    assert [measured.name for measured in found.conditions] == names + LOADS
    for measured in found.conditions:
        assert [summary.architecture for summary in measured.summaries] == ARCHITECTURES
        count = 9 if measured.load else 3
        same = TokenIdentity(count, count, ()) if measured.rule is Rule.AGREEMENT else None
        assert all((of.failed, of.requests, of.identical) == (0, count, same) for of in measured.summaries)
    for of in found.conditions[-1].summaries:
        outputs, inputs = (of.distributions[f"number_{side}_tokens"] for side in ("output", "input"))
        assert outputs.min == outputs.max == 10 and (inputs.min or 0) < (inputs.max or 0)


def test_the_emulated_round_trip_is_measured_and_paid_by_every_round_of_distributed(found: Comparison) -> None:
    far = found.conditions[1]
    assert far.rtt_ms == 12 and far.overhead is not None and far.overhead.link_p50_s >= 0.012
    for record in found.records:  # a target asks a remote drafter only where it wants a draft
        of, waits = record.measurement, ("distributed", "remote_draft")
        if record.condition == far.name and of and not of.run_steps and record.architecture in waits:
            drafted = (of.drafted_per_position or (0,))[0]
            rounds = of.rounds if record.architecture == "distributed" else drafted
            assert of.seconds_by_cause.network >= 0.012 * rounds


def test_each_link_and_load_has_a_verdict(found: Comparison, folder: Path) -> None:
    assert [verdict.condition for verdict in found.decisions] == ["base", "RTT 12 ms", *LOADS]
    page = (folder / "report.html").read_text().replace("\u00a0", " ")
    assert all(verdict.sentence in page for verdict in found.decisions) and "Latency against throughput" in page
    loads = [record.machine_load for record in found.records if record.sent_s is None]
    assert all(load and load.others is not None and 0 <= load.others <= 1 for load in loads)


def test_the_records_alone_give_the_same_report(folder: Path, found: Comparison, tmp_path: Path) -> None:
    records, out = str(folder / "records.jsonl"), tmp_path / "again"
    assert compare.main(["--from-records", records, "--output-dir", str(out)]) == 0
    again = read_comparison(out / "comparison.json")
    assert replace(again, config=found.config) == found and again.missing is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("", "line 1: not of a comparison's records"),
        ('{"kind": "run", "format": 3}\n', "line 1: not of a comparison's records: no 'settings'"),
    ],
)
def test_a_file_that_is_no_records_is_one_line(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        compare.main(["--from-records", str(path)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"from-records: {path}" in line and said in line


def test_prompts_cannot_be_cut_without_the_targets_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rate", "1", "--mean-input-tokens", "9", "--model", str(tmp_path / "none"), "--output-dir"]
    assert compare.main([*arguments, str(tmp_path / "out")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "error: mean-input-tokens: " in line and "no such model folder" in line

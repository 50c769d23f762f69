"""A whole comparison with real servers of the toy backend, across an emulated link."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandem.cli import compare
from tandem.comparison.report import reading

pytestmark = pytest.mark.thorough  # a smaller one daily: test_api.py
SCHEMA = json.loads((Path(reading.__file__).parent / "comparison.schema.json").read_text())
ARCHITECTURES = ["autoregressive", "distributed", "fused", "remote_draft", "pipelined"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one comparison wrote: two links, two temperatures, both rules."""
    folder = tmp_path_factory.mktemp("results") / "run"
    prompts = [argument for text in ("one", "two", "three") for argument in ("--prompt", text)]
    code = compare.main(
        [
            *("--backend", "toy", "--model", "step=0.004", "--draft-model", "miss=0.3,step=0.001", "--draft", "model"),
            *("--architectures", ",".join(ARCHITECTURES)),
            *("--rtt-ms", "0,12", "--temperature", "0,0.8", "--rule", "agreement,rejection"),
            *("--max-new-tokens", "12", "--output-dir", str(folder), *prompts),
        ]
    )
    assert code == 0
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    comparison: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    return comparison


def test_what_is_written_satisfies_its_schema(found: dict[str, Any]) -> None:
    jsonschema.validate(found, SCHEMA)


def test_the_schema_refuses_what_is_none_of_it(found: dict[str, Any]) -> None:
    for broken in ({**found, "more": 1}, {**found, "conditions": []}, {**found, "schema_version": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)


def test_every_condition_ran_every_architecture(found: dict[str, Any]) -> None:
    assert [c["name"] for c in found["conditions"]] == [
        "base",
        "RTT 12 ms",
        "temperature 0.8, agreement",
        "temperature 0.8, rejection",
    ]
    for condition in found["conditions"]:
        assert list(condition["architectures"]) == ARCHITECTURES
        assert all(of["failed"] == 0 and of["requests"] == 3 for of in condition["architectures"].values())


def test_tokens_are_plain_decodings_under_agreement_and_rejection_claims_no_such_thing(found: dict[str, Any]) -> None:
    for condition in found["conditions"]:
        for name in ARCHITECTURES[1:]:
            identical = condition["architectures"][name]["identical_to_autoregressive"]
            if condition["rule"] == "agreement":
                assert identical == {"count": 3, "total": 3, "divergences": []}
            else:
                assert identical is None


def test_rejection_sends_distributions_and_pays_for_them(found: dict[str, Any]) -> None:
    agreement, rejection = (c["architectures"]["distributed"] for c in found["conditions"][2:])
    assert rejection["bytes_up_per_token"] > 1.5 * agreement["bytes_up_per_token"]


def test_the_emulated_round_trip_is_measured_and_paid_by_every_round_of_distributed(found: dict[str, Any]) -> None:
    base, far = found["conditions"][0], found["conditions"][1]
    assert (far["link"]["kind"], far["link"]["rtt_ms"]) == ("emulated", 12)
    assert far["link"]["round_trip_s"] >= 0.012
    for condition, least in ((base, 0.0), (far, 0.012)):
        records = [
            r
            for r in found["records"]
            if r["condition"] == condition["name"] and r["architecture"] in ("distributed", "remote_draft")
        ]
        for r in records:  # a target asks a remote drafter only where it wants a draft
            drafted = (r["drafted_per_position"] or [0])[0]
            asked = r["rounds"] if r["architecture"] == "distributed" else drafted
            assert r["seconds_by_cause"]["network"] >= least * asked
    assert found["link"].startswith("emulated (RTT 0 ms; RTT 12 ms")


def test_theory_stands_beside_every_link_and_the_decision_is_a_sentence(found: dict[str, Any]) -> None:
    names = {(p["architecture"], p["condition"]) for p in found["theory"]["predictions"] if p["error"] is not None}
    assert names == {(name, condition) for name in ARCHITECTURES for condition in ("base", "RTT 12 ms")}
    assert found["decision"]["headline"].startswith("At 0 ms, ")
    assert "On this link (emulated, RTT 0 ms) " in found["decision"]["ratios"]
    assert found["decision"]["speculation_length"] in (0, None)
    assert found["theory"]["length"] is None
    assert all(len(of["at_fixed_lengths"]) == 5 for of in found["theory"]["acceptance"].values())


def test_every_round_trip_has_a_verdict_and_every_request_the_load_of_the_machine(found: dict[str, Any]) -> None:
    assert [verdict["condition"] for verdict in found["verdicts"]] == ["base", "RTT 12 ms"]
    assert found["verdicts"][0]["headline"] == found["decision"]["headline"]
    assert {one["about"] for one in found["statements"]} == {"speed", "prediction", "tokens"}
    for record in found["records"]:
        assert 0 <= record["machine_load"]["others"] <= 1
        assert record["machine_load"]["waiting"] >= 0


def test_report_plots_and_index_lie_beside(folder: Path, found: dict[str, Any]) -> None:
    assert found["decision"]["headline"].split(";")[0] in (folder / "report.html").read_text().replace("\u00a0", " ")
    assert "emulated" in (folder / "report.html").read_text()
    assert list((folder / "plots").glob("*.png"))
    (line,) = (folder.parent / "runs.jsonl").read_text().splitlines()
    assert json.loads(line)["folder"] == "run"


def test_a_report_can_be_made_again(folder: Path) -> None:
    before = (folder / "report.html").read_text()
    path = str(folder / "comparison.json")
    assert compare.main(["--render", path]) == 0
    assert (folder / "report.html").read_text() == before


def test_a_file_that_is_no_comparison_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"schema_version": 1}')
    with pytest.raises(SystemExit) as caught:
        compare.main(["--render", str(path)])
    assert caught.value.code == 2
    assert f"render: {path} has schema version 1" in capsys.readouterr().err


def test_the_records_alone_give_the_same_report(
    folder: Path, found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take seconds
    records, out = str(folder / "records.jsonl"), tmp_path / "again"
    assert compare.main(["--from-records", records, "--output-dir", str(out)]) == 0
    again = json.loads((out / "comparison.json").read_text())
    elsewhere = {"output_dir": str(out), "formats": ["html"]}
    assert again == {**found, "settings": {**found["settings"], **elsewhere}}
    assert again["partial"] is None
    assert not (tmp_path / "runs.jsonl").exists()  # no new run


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("", "line 1: not of a comparison's records"),
        ("{}\n", "line 1: not of a comparison's records: format 1 is needed"),
        ('{"kind": "run", "format": 1}\n', "line 1: not of a comparison's records: no 'settings'"),
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
    assert f"from-records: {path}" in line
    assert said in line

"""The advisor, on a comparison whose costs are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.comparison.analysis.advice import advice_lines, advise, basis, run_advice
from tandem.comparison.analysis.drafts import Copied
from tandem.comparison.analysis.findings import theory_as_json
from tests.comparison.test_predictions import theory


def comparison(**changes: Any) -> dict[str, Any]:
    link = {"kind": "direct", "rtt_ms": 0.0, "bandwidth_mbps": None}
    return {"schema_version": 2, "theory": theory_as_json(theory()), "conditions": [{"link": link}], **changes}


def written(tmp_path: Path, found: object) -> Path:
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(found))
    return path


def test_fused_is_advised_for_one_client_with_what_to_expect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_advice(written(tmp_path, comparison())) == 0
    text = capsys.readouterr().out
    assert text.startswith("At 0 ms round trip and one client: fused with speculation length ")
    assert "plain decoding" in text and "distributed" in text
    assert "What would change this:" in text
    assert "tokens a round" in text


def test_the_doubt_of_the_comparison_comes_before_the_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = {"sureness": "noise", "reasons": ["only 2 prompts were answered", "steps varied"]}
    assert run_advice(written(tmp_path, comparison(decision=decision))) == 0
    first, _, third, *_ = capsys.readouterr().out.splitlines()
    assert first == "The comparison that this rests on is noise: only 2 prompts were answered and steps varied."
    assert third.startswith("At 0 ms round trip and one client: ")


def test_many_clients_move_the_advice_to_drafts_elsewhere() -> None:
    one, many = (advise(*basis(comparison()), clients)[0] for clients in (1, 32))
    assert (one.architecture, many.architecture) == ("fused", "distributed")
    assert many.tpot_s == pytest.approx(32 * many.busy_s)
    lines = list(advice_lines(*basis(comparison())))
    assert any("clients or more on one target: distributed is then the best." in line for line in lines)


def test_lookup_is_an_option_of_its_own_and_every_gain_is_said_against_it_too() -> None:
    model, link = basis(comparison(), rtt_ms=400.0)
    assert "lookup" not in [option.architecture for option in advise(model, link)]
    copying = replace(model, copies=Copied(2.0, 1.0))
    lookup = next(option for option in advise(copying, link) if option.architecture == "lookup")
    assert model.plain_tpot / 2 <= lookup.alone_s < model.plain_tpot and lookup.busy_s <= lookup.alone_s
    (line,) = [line for line in advice_lines(copying, link) if line.startswith("  distributed ")]
    far = next(option for option in advise(copying, link) if option.architecture == "distributed")
    gains = [f"{tpot / far.alone_s:.2f}" for tpot in (model.plain_tpot, lookup.alone_s)]
    assert f"({gains[0]} times plain decoding and {gains[1]} times lookup alone)" in line


def test_a_far_target_makes_distributed_slower_than_plain_decoding() -> None:
    names = [option.architecture for option in advise(*basis(comparison(), rtt_ms=400.0))]
    assert names.index("autoregressive") < names.index("distributed")
    assert names[0] == "fused"


def test_the_length_is_the_best_for_that_link() -> None:
    near, far = (advise(*basis(comparison(), rtt_ms=rtt)) for rtt in (0.0, 300.0))
    lengths = [next(o.length for o in options if o.architecture == "distributed") for options in (near, far)]
    assert lengths[0] < lengths[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "schema version None, and 2 is needed"),
        ('{"schema_version": 1}', "schema version 1, and 2 is needed: measure again"),
        ('{"schema_version": 2, "theory": null}', "it has no costs"),
    ],
)
def test_a_report_that_cannot_advise_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "comparison.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        run_advice(path)


def test_bad_settings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="clients: 0 is below 1"):
        run_advice(tmp_path, clients=0)
    with pytest.raises(ValueError, match="rtt-ms: -1 is outside 0 to 10000"):
        run_advice(tmp_path, rtt_ms=-1)
    with pytest.raises(ValueError, match=r"report: .*nowhere\.json does not exist"):
        run_advice(tmp_path / "nowhere.json")

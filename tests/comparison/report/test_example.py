"""The synthetic comparisons that the report's tests rest on are what the contract allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from tandem.comparison import report
from tests.comparison.report.example_comparison import example, minimal
from tests.daily import daily

SCHEMA = json.loads((Path(report.__file__).parent / "comparison.schema.json").read_text())


@pytest.mark.parametrize("make", daily([example, minimal], 1))
def test_an_example_is_a_comparison_of_version_2(make):
    found = make()
    json.dumps(found, allow_nan=False)
    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(found)] == []


def test_the_example_has_everything_that_a_report_can_show():
    found = example()
    assert list(found["conditions"][0]["architectures"]) == ["autoregressive", "distributed", "fused", "remote_draft"]
    assert {c["link"]["rtt_ms"] for c in found["conditions"]} == {0, 20, 50, 100}
    sampled = {(c["sampling"]["temperature"], c["rule"]) for c in found["conditions"] if c["varies"] == "sampling"}
    assert sampled == {(t, rule) for t in (0.4, 0.8, 1.2) for rule in ("agreement", "rejection")}
    assert len(found["settings"]["prompts"]) == 10
    assert sum(bool(record["error"]) for record in found["records"]) == 1
    assert "synthetic" in found["remarks"][0]

"""A comparison's figures as CloudWatch's metric data, and the job that measures under the load of AWS's sample."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.comparison.measuring.json_form import encoded
from tandem.comparison.measuring.records import Failure, Record
from tandem.comparison.measuring.workloads import built_in_prompts
from tests.comparison.fakes import record
from tests.deploy.manifests import ROOT

SCRIPT = ROOT / "deploy" / "cloudwatch.py"
UNITS = {"Seconds", "Count", "Count/Second"}  # of MetricDatum's StandardUnit


def asked(folder: Path, records: list[Record], *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "comparison.json").write_text(json.dumps({"records": encoded(records)}), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *arguments], capture_output=True, text=True, check=False
    )


def row(prompt: str, architecture: str, ttft: float, condition: str = "base", error: str = "") -> Record:
    made = replace(record(architecture, ttft_s=ttft, output_tokens=512), prompt=prompt, condition=condition)
    return replace(made, measurement=None, error=Failure(error, "")) if error else made


def by_name(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, ...], dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    for each in data:
        assert set(each) == {"MetricName", "Dimensions", "Unit", "StatisticValues"} and each["Unit"] in UNITS
        assert [one["Name"] for one in each["Dimensions"]] == ["Variant", "TestCase"]
    return {
        (each["MetricName"], *(one["Value"] for one in each["Dimensions"])): each["StatisticValues"] for each in data
    }


def test_requests_are_statistics_by_variant_and_test_case(tmp_path: Path) -> None:
    rows = [
        row("eks_sample/numbers", "autoregressive", 1.0),
        row("eks_sample/numbers", "autoregressive", 3.0),
        row("eks_sample/cat", "fused", 0.5),
        row("eks_sample/cat", "fused", 9.0, error="UNAVAILABLE"),
        row("eks_sample/cat", "distributed", 0.25, "RTT 20 ms"),
    ]
    found = by_name(asked(tmp_path, rows))
    assert found["TTFT", "Base", "numbers"] == {"SampleCount": 2, "Sum": 4.0, "Minimum": 1.0, "Maximum": 3.0}
    assert found["OutputTokens", "SD", "cat"]["SampleCount"] == 1, "a failed request is no sample"
    assert len(found) == 12 and not [key for key in found if "distributed" in key]
    assert ("TTFT", "distributed", "cat") in by_name(asked(tmp_path, rows, "--condition", "RTT 20 ms"))


def test_a_prompt_of_a_load_has_the_name_of_the_prompt_that_it_was_cut_from(tmp_path: Path) -> None:
    names = [prompt.name.partition("/")[2] for prompt in built_in_prompts(["eks_sample"])]
    rows = [row(f"eks_sample/{name}", "fused", 0.1) for name in names]
    rows += [row(f"load/{number}", "fused", float(number), "concurrency 1") for number in range(6)]
    found = by_name(asked(tmp_path, rows, "--condition", "concurrency 1"))
    assert {key[2] for key in found} == set(names) == {"numbers", "function", "cat"}
    assert found["TTFT", "SD", "function"]["Sum"] == 1.0 + 4.0


def test_what_is_no_comparison_is_one_line(tmp_path: Path) -> None:
    done = asked(tmp_path, [])
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "condition: 'base' has no request; there are: none" in done.stderr

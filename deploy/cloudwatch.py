"""Writes a comparison's figures as metric data of CloudWatch, by the sample's dimensions Variant and TestCase.

    python deploy/cloudwatch.py results/RUN > metrics.json
    aws cloudwatch put-metric-data --namespace Tandem/Comparison --metric-data file://metrics.json

It sends nothing and needs no AWS account. Each metric is a set of statistics over the requests of a condition.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

METRICS = {
    "TTFT": ("ttft_s", "Seconds"),
    "InterTokenLatency": ("inter_token_latency_s", "Seconds"),
    "EndToEndLatency": ("end_to_end_latency_s", "Seconds"),
    "RequestOutputThroughput": ("request_output_throughput_token_per_s", "Count/Second"),
    "InputTokens": ("number_input_tokens", "Count"),
    "OutputTokens": ("output_tokens", "Count"),
}
"""The sample's metrics: the field of a request in comparison.json, and CloudWatch's unit."""
VARIANTS = {"autoregressive": "Base", "fused": "SD"}
"""The sample's names; other architectures keep theirs."""
AT_MOST = 1000  # metrics in one call of PutMetricData


def test_case(prompt: str, prompts: Sequence[str]) -> str:
    """The prompt's name; of a load's cut prompt, the name of the one that it begins with: load/N has the Nth."""
    kind, _, name = prompt.rpartition("/")
    return test_case(prompts[int(name) % len(prompts)], ()) if kind == "load" and prompts and name.isdigit() else name


def metric_data(records: Sequence[dict[str, Any]], condition: str) -> Iterator[dict[str, Any]]:
    """The condition's requests as statistics by variant, prompt and metric. Raises ValueError."""
    try:
        conditions = sorted({each["condition"] for each in records})
        prompts = list(dict.fromkeys(each["prompt"] for each in records if not each["prompt"].startswith("load/")))
        chosen = [each for each in records if each["condition"] == condition and each["measurement"]]
        if not chosen:
            raise ValueError(f"condition: {condition!r} has no request; there are: {', '.join(conditions) or 'none'}")
        values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for each in chosen:
            variant, case = VARIANTS.get(each["architecture"], each["architecture"]), test_case(each["prompt"], prompts)
            for name, (field, _) in METRICS.items():
                if each["measurement"][field] is not None:
                    values[variant, case, name].append(float(each["measurement"][field]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no comparison's requests: {error}") from None
    for (variant, case, name), those in values.items():
        yield {
            "MetricName": name,
            "Dimensions": [{"Name": "Variant", "Value": variant}, {"Name": "TestCase", "Value": case}],
            "Unit": METRICS[name][1],
            "StatisticValues": {
                "SampleCount": len(those),
                "Sum": sum(those),
                "Minimum": min(those),
                "Maximum": max(those),
            },
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the metric data. Returns 0, or 2 with one line on stderr."""
    words = argparse.ArgumentParser(prog="cloudwatch.py", description=__doc__.partition("\n")[0] if __doc__ else None)
    words.add_argument("results", type=Path, help="the comparison's output folder, which has comparison.json")
    words.add_argument("--condition", default="base", help="of several: base, concurrency 4, ... (default: base)")
    args = words.parse_args(argv)
    file = args.results / "comparison.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        data = list(metric_data(found["records"] if isinstance(found, dict) else (), args.condition))
        if len(data) > AT_MOST:
            raise ValueError(f"{len(data)} metrics, and CloudWatch takes {AT_MOST} in one call: compare fewer prompts")
    except (OSError, ValueError, KeyError) as error:
        print(f"cloudwatch.py: {file}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(data, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares architectures with plain decoding like `make compare`, and on raw prompts over emulated round trips.

Complete comparisons are kept in folders and not measured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks.bars import Bar
from benchmarks.formats import AUTOREGRESSIVE, DISTRIBUTED, FUSED
from benchmarks.links_judged import measured as is_complete
from tandem.cli import compare
from tandem.comparison.analysis.comparison import Comparison, Measured, read_comparison

RUNNING = "never_waiting"
RAW_PROMPTS = Path(__file__).with_name("raw_prompts.txt")  # no draft was trained on these kinds
COMPARISONS: Mapping[str, tuple[str, ...]] = {
    "built-in": (),
    "raw": (
        *("--raw", "--prompt-file", str(RAW_PROMPTS), "--rtt-ms", "0,20,50,100,200"),
        *("--architectures", f"{AUTOREGRESSIVE},{FUSED},{RUNNING}"),
    ),
}
BUILT_IN_FUSED, EVERY_WORKLOAD, WORST_PROMPT, RAW_FUSED, LEVEL, RAW_RUNNING = 1.8, 1.0, 0.98, 1.6, 1.0, 0.98


class Incomplete(RuntimeError):
    """A comparison failed or was interrupted; names it."""


def measured(folder: Path) -> dict[str, Comparison]:
    """Returns the complete comparisons in `folder`, by name."""
    files = {name: folder / name / "comparison.json" for name in COMPARISONS}
    return {name: read_comparison(file) for name, file in files.items() if is_complete(file)}


def measure(folder: Path, extra: tuple[str, ...] = ()) -> dict[str, Comparison]:
    """Runs missing comparisons with `extra` flags; returns all. Raises Incomplete."""
    for name in COMPARISONS.keys() - measured(folder).keys():
        if (code := compare.main([*COMPARISONS[name], *extra, "--output-dir", str(folder / name)])) not in (0, 1):
            raise Incomplete(f"{name}: the comparison ended with {code}")
    found = measured(folder)
    if missing := COMPARISONS.keys() - found.keys():
        raise Incomplete(f"{min(missing)}: the comparison has no result")
    return found


def plain_ratio_bars(comparisons: Mapping[str, Comparison]) -> list[Bar]:
    """Returns the bars on speed over plain decoding."""
    built_in, raw = comparisons.get("built-in"), comparisons.get("raw")
    return [
        Bar("fused / plain, built-in prompts", _speedup(built_in, FUSED), BUILT_IN_FUSED),
        Bar("fused / plain, the least of the workloads", _worst_workload(built_in, FUSED), EVERY_WORKLOAD),
        Bar("fused / plain, the worst prompt", _worst_prompt(built_in, FUSED), WORST_PROMPT),
        Bar("fused / plain, raw prompts", _speedup(raw, FUSED), RAW_FUSED),
        *(Bar(f"{name} / plain at RTT 0", _speedup(built_in, name), LEVEL) for name in (DISTRIBUTED, RUNNING)),
        Bar("never waiting / plain, raw prompts, the worst of 20 to 200 ms", _worst_link(raw, RUNNING), RAW_RUNNING),
    ]


def _speedup(comparison: Comparison | None, name: str) -> float | None:
    return None if comparison is None else _ratio(comparison.base, name)


def _ratio(measured: Measured, name: str) -> float | None:
    summary = measured.of(name)
    return summary.speedup.ratio if summary else None


def _worst_workload(comparison: Comparison | None, name: str) -> float | None:
    summary = comparison.base.of(name) if comparison else None
    ratios = [kind.speedup.ratio for kind in summary.workloads.values()] if summary else []
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _worst_prompt(comparison: Comparison | None, name: str) -> float | None:
    """Returns the least ratio over prompts of plain decoding's median TPOT to that of `name`."""
    if comparison is None:
        return None

    def times(architecture: str) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for record in comparison.records:
            measurement = record.measurement
            named = (record.condition, record.architecture) == (comparison.base.name, architecture)
            if named and measurement and measurement.tpot_s:
                found.setdefault(record.prompt, []).append(measurement.tpot_s)
        return {prompt: statistics.median(own) for prompt, own in found.items()}

    plain, mine = times(AUTOREGRESSIVE), times(name)
    return min((plain[prompt] / mine[prompt] for prompt in plain.keys() & mine.keys()), default=None)


def _worst_link(comparison: Comparison | None, name: str) -> float | None:
    if comparison is None:
        return None
    away = [_ratio(measured, name) for measured in comparison.links if measured.rtt_ms > 0]
    return min((ratio for ratio in away if ratio is not None), default=None)

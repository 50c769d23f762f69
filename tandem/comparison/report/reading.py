"""What a parsed comparison.json (tandem/comparison/report/comparison.schema.json, version 2) says, by the questions a
report asks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

JSON = Mapping[str, Any]

AUTOREGRESSIVE = "autoregressive"
WIDTH_1 = "autoregressive_width_1"
DISTRIBUTED = "distributed"
PLAIN = (AUTOREGRESSIVE, WIDTH_1)


class NothingToDraw(ValueError):
    """The figures that a plot needs are not there; the message is the sentence that stands in its place."""


def base(comparison: JSON) -> JSON:
    """The condition that decisions are made under."""
    condition: JSON = comparison["conditions"][0]
    return condition


def links(comparison: JSON) -> list[JSON]:
    """The conditions that differ from the base in nothing but the link, the base among them, by round trip."""
    varied = [c for c in comparison["conditions"] if c["varies"] in ("base", "link")]
    return sorted(varied, key=lambda condition: float(condition["link"]["rtt_ms"]))


def samplings(comparison: JSON) -> list[JSON]:
    """The conditions that differ from the base in how tokens are drawn and verified; empty where none does."""
    varied = [c for c in comparison["conditions"] if c["varies"] == "sampling"]
    return sorted([base(comparison), *varied], key=lambda c: float(c["sampling"]["temperature"])) if varied else []


def architectures(comparison: JSON) -> list[str]:
    """In the order of their first appearance."""
    return list(dict.fromkeys(name for c in comparison["conditions"] for name in c["architectures"]))


def drafting(condition: JSON) -> list[str]:
    """The architectures that drafted anything."""
    return [name for name, of in condition["architectures"].items() if of["drafted"]]


def baseline(comparison: JSON) -> str | None:
    """The architecture that speedups are quoted against."""
    found = comparison["baseline"]
    return str(found["architecture"]) if found else None


def compared_with_baseline(comparison: JSON) -> list[str]:
    """The base's architectures whose speedup says something."""
    plain = {baseline(comparison), *PLAIN}
    return [name for name in base(comparison)["architectures"] if name not in plain]


def workloads(condition: JSON) -> list[str]:
    found = condition["architectures"].values()
    return list(dict.fromkeys(kind for of in found for kind in of["workloads"]))


def mean_tpot(condition: JSON, architecture: str) -> float | None:
    """Seconds."""
    of = condition["architectures"].get(architecture)
    value: float | None = of["tpot_s"]["mean"] if of else None
    return value


def speculating(comparison: JSON) -> str | None:
    """The one speculating architecture to show where there is room for one: the decision's, or else the first."""
    names = drafting(base(comparison))
    decided = comparison["decision"]["architecture"] if comparison["decision"] else None
    return decided if decided in names else (names[0] if names else None)


def failures(comparison: JSON) -> list[JSON]:
    return [record for record in comparison["records"] if record["error"]]


def typical_prompt(comparison: JSON) -> tuple[str, int, dict[str, JSON]]:
    """A prompt and run of the base whose speedup is nearest the median, and its record by architecture.

    The speedup is that of the architecture the decision names, or else the first that speculates.
    """
    shown, plain = speculating(comparison), baseline(comparison)
    records: dict[tuple[str, int], dict[str, JSON]] = {}
    for record in comparison["records"]:
        if record["condition"] == base(comparison)["name"] and not record["error"] and record["chunk_tokens"]:
            records.setdefault((record["prompt"], record["run"]), {})[record["architecture"]] = record
    speedups = {
        key: of[plain]["tpot_s"] / of[shown]["tpot_s"]
        for key, of in records.items()
        if shown in of and plain in of and of[shown]["tpot_s"] and of[plain]["tpot_s"]
    }
    complete = max((len(records[key]) for key in speedups), default=0)
    whole = {key: value for key, value in speedups.items() if len(records[key]) == complete}
    if not whole:
        raise NothingToDraw("No prompt was answered by both plain decoding and an architecture that speculates.")
    median = statistics.median(speedups.values())
    prompt, run = min(whole, key=lambda key: (abs(whole[key] - median), key))
    return prompt, run, records[prompt, run]


def emulated(conditions: Sequence[JSON]) -> bool:
    """Whether any of their links is not a real one."""
    return any(condition["link"]["kind"] != "direct" for condition in conditions)

"""Reads a comparison.json, and the facts that a report needs from it (comparison.schema.json, version 2)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.comparison.measuring.architectures import PLAIN
from tandem.comparison.measuring.json_form import read_text

JSON = Mapping[str, Any]
SCHEMA_VERSION = 2
"""Incremented when the meaning of a key changes or a key is removed, not for new keys."""


class NothingToDraw(ValueError):
    """The figures for a plot are missing; the message is shown in its place."""


def read_comparison(path: Path, flag: str = "report") -> dict[str, Any]:
    """Reads and checks a comparison.json. Raises a one-line ValueError."""
    try:
        found = json.loads(read_text(path, flag))
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag}: {path} cannot be read: {error}") from None
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{flag}: {path} has schema version {version}, and {SCHEMA_VERSION} is needed: measure again")
    return dict(found)


def base(comparison: JSON) -> JSON:
    """Returns the base condition, under which decisions are made."""
    condition: JSON = comparison["conditions"][0]
    return condition


def links(comparison: JSON) -> list[JSON]:
    """Returns the base and the conditions that differ from it only in the link, by round trip."""
    varied = [c for c in comparison["conditions"] if c["varies"] in ("base", "link")]
    return sorted(varied, key=lambda condition: float(condition["link"]["rtt_ms"]))


def same_round_trip(conditions: Sequence[JSON]) -> bool:
    """Whether several links have the same round trip: they differ in what else they are."""
    return len({condition["link"]["rtt_ms"] for condition in conditions}) < len(conditions)


def samplings(comparison: JSON) -> list[JSON]:
    """Returns the base and the conditions with other sampling or rules, by temperature; empty if there are none."""
    varied = [c for c in comparison["conditions"] if c["varies"] == "sampling"]
    return sorted([base(comparison), *varied], key=lambda c: float(c["sampling"]["temperature"])) if varied else []


def architectures(comparison: JSON) -> list[str]:
    """Returns all architectures in the order of first appearance."""
    return list(dict.fromkeys(name for c in comparison["conditions"] for name in c["architectures"]))


def drafting(condition: JSON) -> list[str]:
    """Returns the architectures that drafted tokens."""
    return [name for name, of in condition["architectures"].items() if of["drafted"]]


def baseline(comparison: JSON) -> str | None:
    """Returns the architecture that speedups refer to."""
    found = comparison["baseline"]
    return str(found["architecture"]) if found else None


def compared_with_baseline(comparison: JSON) -> list[str]:
    """Returns the base's architectures except plain decoding and the baseline."""
    plain = {baseline(comparison), *PLAIN}
    return [name for name in base(comparison)["architectures"] if name not in plain]


def missed(comparison: JSON) -> dict[str, list[JSON]]:
    """Returns the predictions that measurement contradicts, by architecture."""
    found: dict[str, list[JSON]] = {}
    for prediction in (comparison["theory"] or {}).get("predictions", ()):
        if prediction.get("missed"):
            found.setdefault(prediction["architecture"], []).append(prediction)
    return found


def workloads(condition: JSON) -> list[str]:
    found = condition["architectures"].values()
    return list(dict.fromkeys(kind for of in found for kind in of["workloads"]))


def mean_tpot(condition: JSON, architecture: str) -> float | None:
    """Returns the mean TPOT in seconds."""
    of = condition["architectures"].get(architecture)
    value: float | None = of["tpot_s"]["mean"] if of else None
    return value


def speculating(comparison: JSON) -> str | None:
    """Returns the speculating architecture to show if only one fits: the decision's, otherwise the first."""
    names = drafting(base(comparison))
    decided = comparison["decision"]["architecture"] if comparison["decision"] else None
    return decided if decided in names else (names[0] if names else None)


def failures(comparison: JSON) -> list[JSON]:
    return [record for record in comparison["records"] if record["error"]]


def partial(comparison: JSON) -> str | None:
    """Says why and how much of a comparison is missing; None if it is complete."""
    if not (found := comparison.get("partial")):
        return None
    planned = found["planned"] or "an unknown number of"
    return f"{found['reason']}; {found['measured']} of {planned} requests were measured"


def model_values(comparison: JSON, key: str) -> list[str]:
    """Returns the different values of a field of the servers' models."""
    models = (server["model"] for server in comparison["servers"].values())
    return list(dict.fromkeys(str(model[key]) for model in models if model.get(key)))


def machine(machine: JSON) -> str:
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    return f"{machine['processor']}, {machine['usable_cores']} cores{memory}, {machine['system']}"


def typical_prompt(comparison: JSON) -> tuple[str, int, dict[str, JSON]]:
    """Returns the prompt and run of the base with the speedup nearest the median, and its records by architecture.

    The speedup is that of the architecture in the decision, otherwise of the first that speculates.
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

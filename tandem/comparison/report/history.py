"""Keeps the index of runs, and puts a run beside earlier ones of the same configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.comparison.measuring.architectures import PLAIN
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Cell, Table, numbers, table, words
from tandem.comparison.report.reading import JSON

INDEX = "runs.jsonl"
SAME = ("machine", "models", "dtype", "link", "prompts", "num_runs", "max_new_tokens", "speculation_length",
        "temperature", "rule", "rehearse")  # fmt: skip
"""What two runs have in common whose speedups can be put beside each other. The commit may differ."""
MOST = 12
"""The number of runs that are shown, this one included."""
BARS = "▁▂▃▄▅▆▇█"


def append_run(comparison: JSON, folder: Path) -> Path:
    """Adds the run to `runs.jsonl` beside its folder, in one write so that concurrent runs do not mix."""
    path = folder.resolve().parent / INDEX
    line = json.dumps(run_as_json(comparison, folder), allow_nan=False, ensure_ascii=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
    return path


def run_as_json(comparison: JSON, folder: Path) -> dict[str, Any]:
    """Returns the key figures of the base condition and the path of the rest."""
    settings, base, partial = comparison["settings"], reading.base(comparison), comparison.get("partial")
    return {
        "started_at": comparison["started_at"],
        "folder": folder.name,
        "partial": partial["reason"] if partial else None,
        "git_commit": comparison["versions"]["git_commit"],
        "machine": reading.machine(comparison["machine"]),
        "models": sorted(reading.model_values(comparison, "model_name")),
        "dtype": sorted(reading.model_values(comparison, "dtype")),
        "link": comparison["link"],
        "prompts": len(settings["prompts"]),
        **{key: settings.get(key) for key in ("num_runs", "max_new_tokens", "speculation_length", "rehearse")},
        "temperature": base["sampling"]["temperature"],
        "rule": base["rule"],
        "sureness": (comparison["decision"] or {}).get("sureness"),
        "architectures": {name: _figures(of) for name, of in base["architectures"].items()},
    }


def _figures(of: JSON) -> dict[str, Any]:
    same = of["identical_to_autoregressive"]
    return {
        "tpot_s": of["tpot_s"]["mean"],
        "speedup": of["speedup_vs_autoregressive"],
        **{key: of[key] for key in ("speedup_interval", "acceptance_rate", "mean_acceptance_length")},
        "identical": [same["count"], same["total"]] if same else None,
        "failed": of["failed"],
    }


def runs_until(run: JSON, folder: Path) -> list[JSON]:
    """Returns the complete runs of the index before `run` and with its configuration, and then `run`.

    Lines that are no runs are skipped: the index is a convenience, and a report does not depend on it.
    """
    try:
        lines = (folder.resolve().parent / INDEX).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    found = {one["started_at"]: one for line in lines if (one := _parsed(line)) is not None and _alike(one, run)}
    return [*(found[at] for at in sorted(found)[-(MOST - 1) :]), run]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    architectures = found.get("architectures") if isinstance(found, dict) else None
    known = isinstance(architectures, dict) and all(isinstance(of, dict) for of in architectures.values())
    return found if known and isinstance(found.get("started_at"), str) else None


def _alike(one: JSON, run: JSON) -> bool:
    same = all(one.get(key) == run[key] for key in SAME)
    return same and not one.get("partial") and one["started_at"] < run["started_at"]


def history_table(runs: Sequence[JSON]) -> Table | None:
    """Speedups of runs, the newest last and first in the table; None if there is only one run."""
    if len(runs) < 2:
        return None
    names = [name for name in runs[-1]["architectures"] if name not in PLAIN]
    rows: list[list[Cell | str]] = []
    for run in reversed(runs):
        when = str(run["started_at"])[:16].replace("T", " ")
        speedups = [Cell(fmt.times(_speedup(run, name))) for name in names]
        sureness, commit = (str(run.get(key) or fmt.MISSING) for key in ("sureness", "git_commit"))
        rows.append([when, *speedups, Cell(sureness, tone=sureness), commit])
    course = [sparkline([_speedup(run, name) for run in runs]) for name in names]
    rows.append(["oldest to newest", *course, "", ""])
    return table(
        "Speedup over plain decoding in runs of this configuration",
        [*words("started (UTC)"), *numbers(*map(fmt.name, names)), *words("how sure", "commit")],
        rows,
        "From runs.jsonl beside the folder of this run: same machine, models, formats, link, sampling and amount of"
        " work. The last row draws each column from its least to its most.",
    )


def _speedup(run: Mapping[str, Any], name: str) -> float | None:
    value = run["architectures"].get(name, {}).get("speedup")
    return float(value) if isinstance(value, int | float) else None


def sparkline(values: Sequence[float | None]) -> str:
    """Draws values as bars from the least to the most; a missing one is a gap."""
    known = [value for value in values if value is not None]
    if not known:
        return fmt.MISSING
    low, extent = min(known), max(known) - min(known)
    steps = ((value - low) / extent if extent else 0.5 for value in known)
    bars = iter([BARS[round(step * (len(BARS) - 1))] for step in steps])
    return "".join(" " if value is None else next(bars) for value in values)

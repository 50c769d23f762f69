"""Appends runs to the index of the results folder, one line per run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.comparison.report.files import Comparison

INDEX = "runs.jsonl"


def append_run(comparison: Comparison) -> Path:
    """Adds the run to `runs.jsonl` beside its folder, in one write so that concurrent runs do not mix."""
    path = comparison.config.output_dir.resolve().parent / INDEX
    line = json.dumps(run_as_json(comparison), allow_nan=False, ensure_ascii=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
    return path


def run_as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the key figures of the base condition and the path of the rest."""
    config, base = comparison.config, comparison.base
    models = {e.model.model_name for e in comparison.endpoints}
    return {
        "started_at": comparison.started_at,
        "folder": config.output_dir.name,
        "partial": comparison.partial.reason if comparison.partial else None,
        "git_commit": comparison.versions.git_commit,
        "machine": str(comparison.machine),
        "models": sorted(models),
        "dtype": sorted({e.model.dtype for e in comparison.endpoints}),
        "link": comparison.link,
        "prompts": len(config.prompts),
        "num_runs": config.num_runs,
        "max_new_tokens": config.max_new_tokens,
        "speculation_length": config.speculation_length,
        "temperature": config.sampling.temperature,
        "rule": config.rules[0].value,
        "architectures": {
            s.architecture: {
                "tpot_s": s.distributions["tpot_s"].mean,
                "speedup": s.speedup.speedup if s.speedup else None,
                "speedup_interval": list(s.speedup.interval) if s.speedup and s.speedup.interval else None,
                "acceptance_rate": s.acceptance.acceptance_rate,
                "mean_acceptance_length": s.acceptance.mean_acceptance_length,
                "identical": [s.identical.count, s.identical.total] if s.identical else None,
                "failed": s.failed,
            }
            for s in base.summaries
        },
    }

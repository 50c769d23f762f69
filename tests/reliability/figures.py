"""What campaigns measured, for results/reliability.json and one summary on the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import REPOSITORY

PATH = REPOSITORY / "results" / "reliability.json"
_noted: dict[str, dict[str, Any]] = {}


def note(campaign: str, **figures: Any) -> None:
    """Adds a campaign's figures to this run's."""
    _noted.setdefault(campaign, {}).update(figures)


def noted() -> Mapping[str, Mapping[str, Any]]:
    return _noted


def write(path: Path = PATH) -> None:
    """Puts this run's figures into the file; those of campaigns that did not run stay as they were."""
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {name: {"measured": stamp, **figures} for name, figures in _noted.items()}
    path.write_text(json.dumps(before | entries, indent=2) + "\n", encoding="utf-8")


def summary() -> list[str]:
    lines = []
    for campaign, figures in _noted.items():
        said = ", ".join(f"{name.replace('_', ' ')} {_text(value)}" for name, value in figures.items())
        lines.append(f"{campaign}: {said}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{name} {number}" for name, number in value.items()) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)

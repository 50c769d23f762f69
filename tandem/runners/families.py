"""The tested families of models, by model_type of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.checkpoints.family_configs import table
from tandem.checkpoints.locate import CheckpointError


def served() -> tuple[str, ...]:
    """Tested families, those of native steps first; module code serves all."""
    return (*table()["native"], *table()["module"])


def check_family(folder: str, config: Mapping[str, Any], untested: bool = False) -> None:
    """Raises CheckpointError for a family that is refused, or untested unless `untested` allows it."""
    kind = str(config.get("model_type"))[:60]
    if reason := next((reason for reason, names in table()["refused"].items() if kind in names), ""):
        raise CheckpointError(f"{folder}: model_type: nothing here serves {kind}: {reason}")
    if kind not in served() and not untested:
        raise CheckpointError(
            f"{folder}: model_type: {kind} is not among the families that were tested (docs/models.md); "
            "--untested_model tries it in module code"
        )

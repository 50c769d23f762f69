"""Whether NxD Inference can be imported here, asked without importing it; tandem/planning/detect.py says why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from tandem.planning.detect import missing

PACKAGES = ("neuronx-distributed-inference", "neuronx-distributed", "torch-neuronx")
ALSO = ("neuronx-cc", "torch", "transformers")


def require_nxdi() -> None:
    """Raises ValueError, one line that says what to do, unless NxDI and what it needs are installed.

    Devices are not asked for: a machine without one may compile.
    """
    absent = [package for package in PACKAGES if not importable(package)]
    if absent:
        why = missing("nxdi", compile_only=True)
        raise ValueError(why or f"backend: nxdi is not available here: {', '.join(absent)} cannot be imported")


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def importable(package: str) -> bool:
    """Whether there is a package with something in it; placeholders are an empty `__init__.py`, or not even that."""
    name = package.replace("-", "_")
    if name in sys.modules:
        return True
    spec = importlib.util.find_spec(name)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return any(other.name not in ("__init__.py", "__pycache__") for place in places for other in place.iterdir())


def versions() -> dict[str, str]:
    """What a compiled folder depends on."""
    return {name: installed_version(name) or "unknown" for name in (*PACKAGES, *ALSO)}

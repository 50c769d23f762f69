"""Whether NxD Inference is here, without importing it. PyPI holds unrelated packages under its names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

PACKAGES = ("neuronx-distributed-inference", "neuronx-distributed", "torch-neuronx")
ALSO = ("neuronx-cc", "torch", "transformers")
INDEX = "https://pip.repos.neuron.amazonaws.com"


def require_nxdi() -> None:
    """Raises ValueError, one line that says what to do, unless NxDI and what it needs are installed."""
    absent = [package for package in PACKAGES if not importable(package)]
    if not absent:
        return
    placeholders = [f"{package} {version}" for package in absent if (version := installed(package))]
    if placeholders:
        raise ValueError(
            f"backend: nxdi is not installed here: {', '.join(placeholders)} is PyPI's placeholder of that name, not "
            f"the Neuron SDK's; uninstall it and install from {INDEX} (docs/trainium-nxdi.md)"
        )
    raise ValueError(
        f"backend: nxdi is not installed here ({', '.join(absent)} missing); it runs on Trainium and Inferentia "
        f"with the Neuron SDK, from {INDEX} (docs/trainium-nxdi.md)"
    )


def installed(package: str) -> str | None:
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
    return {name: installed(name) or "unknown" for name in (*PACKAGES, *ALSO)}

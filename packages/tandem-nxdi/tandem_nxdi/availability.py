"""Checks whether NxD Inference can be imported, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys

from tandem.host.clashes import clashes, refusal
from tandem.host.detect import DOCTOR, missing
from tandem.host.packages import installed_package, installed_packages

log = logging.getLogger("tandem.engine")
PACKAGES = ("neuronx-distributed-inference", "neuronx-distributed", "torch-neuronx")
ALSO = ("neuronx-cc", "torch", "transformers")


def require_nxdi() -> None:
    """Raises ValueError, one line that says what to do, unless NxDI and its dependencies are installed.

    Does not look for devices: a machine without one may compile. Other versions than NxDI's own metadata ask for are
    refused where NxDI calls or is compiled against them, and else said in the log.
    """
    found = clashes(installed_packages())
    if why := refusal(found):
        raise ValueError(f"backend: nxdi is not available here: {why}; {DOCTOR}")
    for clash in found:
        log.warning("%s", clash)
    absent = [package for package in PACKAGES if not importable(package)]
    if absent:
        why = missing("nxdi", compile_only=True)
        raise ValueError(why or f"backend: nxdi is not available here: {', '.join(absent)} cannot be imported")


def installed_version(package: str) -> str | None:
    """Any package's version, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def importable(package: str) -> bool:
    """Whether the package can be imported and is not one of PyPI's placeholders."""
    name = package.replace("-", "_")
    if name in sys.modules:
        return True
    found = installed_package(package)
    return importlib.util.find_spec(name) is not None and not (found and found.placeholder)


def versions() -> dict[str, str]:
    """Versions of the packages that compiled code depends on."""
    return {name: installed_version(name) or "unknown" for name in (*PACKAGES, *ALSO)}

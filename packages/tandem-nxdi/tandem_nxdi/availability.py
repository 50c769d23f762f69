"""Checks whether NxD Inference can be imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys

from tandem.host.detect import DOCTOR, missing
from tandem.host.packages import clashes, distributions, installed_package, installed_packages, refusal

PACKAGES = ("neuronx-distributed-inference", "neuronx-distributed", "torch-neuronx")
ALSO = ("neuronx-cc", "torch", "transformers")


def require_nxdi() -> None:
    """Raises ValueError, one line with the remedy, unless NxDI and its dependencies are installed.

    Needs no device: any machine may compile. Packages that NxDI calls or is compiled against must have the versions of
    NxDI's metadata.
    """
    if why := refusal(clashes(installed_packages())):
        raise ValueError(f"backend: nxdi is not available here: {why}; {DOCTOR}")
    absent = [package for package in PACKAGES if not importable(package)]
    if absent:
        why = missing("nxdi", compile_only=True)
        raise ValueError(why or f"backend: nxdi is not available here: {', '.join(absent)} cannot be imported")


def importable(package: str) -> bool:
    """Whether the package is there and no placeholder of PyPI."""
    name = package.replace("-", "_")
    if name in sys.modules:
        return True
    found = installed_package(package)
    return importlib.util.find_spec(name) is not None and not (found and found.placeholder)


def versions() -> dict[str, str]:
    """Versions of the packages that compiled code depends on."""
    found = distributions()
    return {name: found[name].version if name in found else "unknown" for name in (*PACKAGES, *ALSO)}

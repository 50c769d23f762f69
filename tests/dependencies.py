"""Prints the pinned packages with version, licence and the packages that need them: `python tests/dependencies.py`."""

from __future__ import annotations

import importlib.metadata as metadata
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    *("requirements-serve.txt", "requirements-compare.txt", "requirements.txt", "constraints.txt"),
    *("requirements-weights.txt", "requirements-stubs.txt", "requirements-graphs.txt"),
)

# Packages whose metadata name no licence, or that are not installed everywhere: looked up in their sources.
LOOKED_UP = {
    "async-timeout": "Apache-2.0",
    "colorama": "BSD-3-Clause",
    "cycler": "BSD-3-Clause",
    "exceptiongroup": "MIT",
    "kiwisolver": "BSD-3-Clause",
    "matplotlib": "PSF-2.0",
    "tomli": "MIT",
    "torch-mlir": "Apache-2.0 WITH LLVM-exception",
}


def pins() -> dict[str, list[str]]:
    """Pinned versions by package, in the order of the files."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith(("#", "-c ", "-r ")):
                requirement = Requirement(line)
                found[canonicalize_name(requirement.name)] += [pin.version for pin in requirement.specifier]
    return dict(found)


def licence(name: str) -> str | None:
    """The licence in an installed package's metadata; None if it is not installed."""
    if name in LOOKED_UP:
        return LOOKED_UP[name]
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    kinds = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or () if c.startswith("License :: OSI")]
    return str(about["License-Expression"] or " OR ".join(kinds) or (about["License"] or "").partition("\n")[0])


def needed_by(name: str) -> list[str]:
    """The pinned and installed packages that require `name`."""
    found = []
    for other in pins():
        try:
            requirements = [Requirement(line) for line in metadata.requires(other) or ()]
        except metadata.PackageNotFoundError:
            continue
        if any(canonicalize_name(each.name) == name and "extra ==" not in str(each.marker) for each in requirements):
            found.append(other)
    return found


if __name__ == "__main__":
    for package, versions in pins().items():
        print(f"{package} {', '.join(versions)}: {licence(package) or 'not installed'}", end="")
        print(f" (needed by {', '.join(needed_by(package))})" if needed_by(package) else "")

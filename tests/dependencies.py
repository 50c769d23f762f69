"""Makes docs/dependencies.md from the pins and from the metadata of installed packages.

`python tests/dependencies.py` writes the page again and keeps its reasons for each package.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import sys
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "dependencies.md"
FILES = (
    *("requirements-serve.txt", "requirements-compare.txt", "requirements.txt", "constraints.txt"),
    *("requirements-weights.txt", "requirements-stubs.txt", "requirements-graphs.txt"),
)

# Packages whose metadata name no licence, or that are not installed everywhere: looked up in their sources.
SAID_ELSEWHERE = {
    "async-timeout": "Apache-2.0",
    "colorama": "BSD-3-Clause",
    "cycler": "BSD-3-Clause",
    "exceptiongroup": "MIT",
    "kiwisolver": "BSD-3-Clause",
    "matplotlib": "PSF-2.0",
    "tomli": "MIT",
    "torch-mlir": "Apache-2.0 WITH LLVM-exception",
}

HEAD = "| package | pinned | licence | why |\n|---|---|---|---|\n"


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
    """The licence that an installed package states; None if it is not installed."""
    if name in SAID_ELSEWHERE:
        return SAID_ELSEWHERE[name]
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    kinds = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or () if c.startswith("License :: OSI")]
    return str(about["License-Expression"] or " OR ".join(kinds) or (about["License"] or "").partition("\n")[0])


def rows() -> dict[str, tuple[str, str, str]]:
    """The rows of the page: pinned versions, licence and reason, by package."""
    found = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {name: (pinned, kind, why) for name, pinned, kind, why in found}


def who_needs(name: str) -> str:
    """Names up to three pinned packages that require `name`, as 'of a, b'."""
    asking = []
    for other in pins():
        try:
            asked = metadata.requires(other) or ()
        except metadata.PackageNotFoundError:
            continue
        wanted = [Requirement(line) for line in asked]
        if any(canonicalize_name(each.name) == name and "extra ==" not in str(each.marker) for each in wanted):
            asking.append(other)
    return f"of {', '.join(sorted(asking)[:3])}" if asking else "?"


def page() -> str:
    """Returns the page as it should be, with `?` where a reason is missing."""
    before, lines = rows(), []
    for name, versions in pins().items():
        _, kind, why = before.get(name, ("", "?", "?"))
        lines.append(
            f"| `{name}` | {', '.join(versions)} | {licence(name) or kind} | {who_needs(name) if why == '?' else why} |"
        )
    return PAGE.read_text(encoding="utf-8").partition(HEAD)[0] + HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(int("| ? |" in PAGE.read_text(encoding="utf-8")))

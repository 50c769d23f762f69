"""Describes the machine and the software versions of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tandem.host.cores import usable_cores
from tandem.host.host import LIBRARIES, first_processor, name_of
from tandem.host.packages import installed_version


@dataclass(frozen=True, slots=True)
class Machine:
    """The driver's machine and software; connected servers may run elsewhere."""

    system: str
    architecture: str
    processor: str
    usable_cores: int
    memory_bytes: int | None
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None

    def __str__(self) -> str:
        memory = f", {self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        return f"{self.processor}, {self.usable_cores} cores{memory}, {self.system}"


def this_machine() -> Machine:
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=name_of(first_processor()),
        usable_cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        python=platform.python_version(),
        packages={name: version for name in LIBRARIES if (version := installed_version(name))},
        git_commit=_git_commit(),
    )


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _git_commit() -> str | None:
    """Returns this checkout's commit, with "-dirty" if files differ."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None

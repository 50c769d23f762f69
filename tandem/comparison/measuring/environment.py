"""Describes the machine and the versions of software that figures belong to."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

PACKAGES: tuple[str, ...] = ("torch", "transformers", "grpcio", "protobuf", "numpy")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the driver; connected servers may run elsewhere."""

    system: str
    architecture: str
    processor: str
    usable_cores: int
    memory_bytes: int | None

    def __str__(self) -> str:
        memory = f", {self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        return f"{self.processor}, {self.usable_cores} cores{memory}, {self.system}"


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of Python, this checkout and the installed packages."""

    python: str
    packages: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None


def this_machine() -> Machine:
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        processor=_processor(),
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
    )


def these_versions(packages: Sequence[str] = PACKAGES) -> Versions:
    return Versions(platform.python_version(), {name: v for name in packages if (v := _version(name))}, _git_commit())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Returns the commit of this checkout, with "-dirty" if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None

"""The C++ of this folder compiled for this CPU, once: 7 s with g++, then a file in the cache folder.

Needs a C++20 compiler ($CXX, g++ or clang++). Its only library is the C++ standard library.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tandem.checkpoints.trusted_cache import cache_root, flaw, locked, private_folder, seal

log = logging.getLogger("tandem.models")
SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")


class CannotBuild(ValueError):
    """No compiler, or it refuses."""


def library_path() -> Path:
    """The compiled library, made now if need be. Raises CannotBuild."""
    compiler = _compiler()
    try:
        target = private_folder(cache_root()) / f"native-{_key(compiler)}.so"
        note = target.with_suffix(".json")
        if flaw(note) is not None:
            with locked(target.with_suffix(".lock")):
                wrong = flaw(note)
                if wrong:
                    log.warning("compiled steps are not used and made again: %s", wrong)
                if wrong is not None:
                    _compile(compiler, target)
                    seal(note, [target])
    except OSError as error:
        raise CannotBuild(f"{cache_root()}: {error}") from error
    return target


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    raise CannotBuild("no C++ compiler: install g++ or clang++, or name one in CXX")


def _key(compiler: str) -> str:
    """What the machine code depends on: sources, flags, compiler, CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [*FLAGS, version, platform.machine(), _cpu_features()]
    parts += [path.read_text() for path in sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _compile(compiler: str, target: Path) -> None:
    """A process that has the old file mapped keeps it: the new one takes its name."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, str(SOURCES / "api.cpp"), "-o", str(made)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise CannotBuild(f"{compiler} failed: {(ran.stderr.strip().splitlines() or ['no message'])[0]}")
        made.rename(target)

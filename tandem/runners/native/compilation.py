"""Finds the library installed for CPUs like this one, or compiles this folder's C++ once, with a C++20 compiler."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.trusted_cache import cache_root, made_once
from tandem.host.cores import usable_cores
from tandem.installing import IN_A_CHECKOUT, install_command
from tandem.runners.native import LibraryMissing

SOURCES = Path(__file__).parent
LIBRARY = "tandem.so"
FLAGS: tuple[str, ...] = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
PACKAGE = "tandem_native"
_AVX2 = frozenset(("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
_AVX512 = _AVX2 | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl", "_vnni")}


@dataclass(frozen=True, slots=True)
class Level:
    """Instructions of a library. `needs`: CPU features, as in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


LEVELS = (
    Level("avx512_bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    Level("avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512),
    Level("avx2", ("-march=x86-64-v3",), _AVX2),
)  # distinguished by the sources on x86-64, best first


def file_name(level: Level, sources: str) -> str:
    return f"{level.name}-{sources[:16]}.so"


def prebuilt_library(sources: str, features: str, package: str = PACKAGE) -> Path | None:
    """The installed library of the best level for these CPU features and sources, or None."""
    spec = importlib.util.find_spec(package)
    here = frozenset(features.split())
    level = next((level for level in LEVELS if level.needs <= here), None)
    if spec is None or level is None:
        return None
    files = (Path(folder, file_name(level, sources)) for folder in spec.submodule_search_locations or ())
    return next((file for file in files if file.is_file()), None)


def library_path() -> Path:
    """The installed library, or one compiled now or before. Raises LibraryMissing."""
    if built := prebuilt_library(sources_hash(), cpu_features()):
        return built
    compiler = find_compiler()
    what = f"compiling the native steps for this CPU with {compiler}"
    try:
        folder = made_once(
            cache_root(), f"native-{_key(compiler)}", what, lambda folder: build(compiler, FLAGS, folder / LIBRARY)
        )
    except OSError as error:
        where = f"{cache_root()} ({error.strerror}); name another folder with TANDEM_CACHE"
        raise LibraryMissing(f"the native steps cannot be compiled into {where}") from error
    return folder / LIBRARY


def find_compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    ahead = install_command("serve")
    raise LibraryMissing(
        "no C++ compiler: install g++ or clang++, or set CXX"
        + ("" if ahead == IN_A_CHECKOUT else f"; or, for x86-64, a library that is compiled already: {ahead}")
    )


def _key(compiler: str) -> str:
    # everything that machine code depends on
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [*FLAGS, version, platform.machine(), cpu_features()]
    return hashlib.sha256("\0".join([*parts, *_sources()]).encode()).hexdigest()[:32]


def sources_hash() -> str:
    """Hash of the sources and of flags common to all machines."""
    return hashlib.sha256("\0".join([*FLAGS, *_sources()]).encode()).hexdigest()


def _sources() -> list[str]:
    return [path.read_text() for path in sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp"))]


def cpu_features() -> str:
    return _cpu_line("flags", "features")


def cpu_model() -> str:
    return _cpu_line("model name", "cpu part")


def _cpu_line(*names: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(names)), "")


def build(compiler: str, flags: Sequence[str], library: Path) -> None:
    """Compiles and links the sources. Raises LibraryMissing."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = {source: Path(folder, f"{source.stem}.o") for source in SOURCES.glob("*.cpp")}
        with ThreadPoolExecutor(min(len(objects), usable_cores())) as pool:
            each = [pool.submit(_run, [compiler, *flags, "-c", source, "-o", made]) for source, made in objects.items()]
            for one in each:
                one.result()
        _run([compiler, *flags, *objects.values(), "-o", library])


def _run(command: Sequence[str | Path]) -> None:
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise LibraryMissing(f"{command[0]} failed: {(ran.stderr.strip().splitlines() or ['no message'])[0]}")

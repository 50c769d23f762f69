"""CPU, memory, compiler, libraries and GPUs, without importing torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.host.cores import meminfo, usable_cores
from tandem.host.packages import installed_version

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16")
LIBRARIES = ("torch", "transformers", "tokenizers", "grpcio", "protobuf", "numpy")
SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Host:
    """`compiler`: builds the native steps; None without one."""

    system: str
    python: str
    processor: str
    cores: int
    memory_bytes: int | None
    features: tuple[str, ...]
    compiler: str | None
    libraries: dict[str, str]
    gpus: tuple[str, ...]


def find_host(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Host:
    """Examines the machine. The arguments are for tests."""
    environment = os.environ if environment is None else environment
    cpu = first_processor(root)
    flags = (cpu.get("flags") or cpu.get("features") or "").split()
    return Host(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        processor=name_of(cpu),
        cores=usable_cores(root),
        memory_bytes=meminfo("MemTotal", root),
        features=tuple(name for name in FEATURES if name in flags),
        compiler=_compiler(environment),
        libraries={name: version for name in LIBRARIES if (version := installed_version(name))},
        gpus=_gpus(environment),
    )


def name_of(processor: Mapping[str, str]) -> str:
    """A processor's name in /proc/cpuinfo, else Python's."""
    return processor.get("model name") or platform.processor() or platform.machine()


def first_processor(root: Path = Path("/")) -> dict[str, str]:
    """The first processor of /proc/cpuinfo, keys in lower case."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    found: dict[str, str] = {}
    for key, _, value in pairs:
        found.setdefault(key.strip().lower(), value.strip())
    return found


def _compiler(environment: Mapping[str, str]) -> str | None:
    """The compiler that tandem/runners/native/compilation.py would use."""
    names = (environment.get("CXX"), "g++", "clang++", "c++")
    found = (shutil.which(name, path=environment.get("PATH")) for name in names if name)
    return next((path for path in found if path), None)


def _gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Name, memory and driver by nvidia-smi."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH", ""))
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=False, env=dict(environment))
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in ran.stdout.splitlines() if line.strip()) if ran.returncode == 0 else ()

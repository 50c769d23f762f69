"""Finds a library compiled ahead for CPUs like this one: the package tandem-speculative-native."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

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
    """The best level's library for these CPU features and sources, or None."""
    spec = importlib.util.find_spec(package)
    here = frozenset(features.split())
    level = next((level for level in LEVELS if level.needs <= here), None)
    if spec is None or level is None:
        return None
    files = (Path(folder, file_name(level, sources)) for folder in spec.submodule_search_locations or ())
    return next((file for file in files if file.is_file()), None)

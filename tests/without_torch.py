"""Runs main.py where torch and transformers cannot be imported, as in an environment of those who serve alone."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ABSENT = ("torch", "transformers", "accelerate")
MAIN = str(Path(__file__).resolve().parents[1] / "main.py")


class Absent:
    """A finder that finds nothing under these names; first on sys.meta_path, it hides what is installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose http/ would hide Python's
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
    sys.argv[0] = MAIN
    runpy.run_path(MAIN, run_name="__main__")

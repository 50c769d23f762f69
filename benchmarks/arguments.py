"""Parses benchmarks' flags, in hyphen and underscore spelling."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A benchmark's parser; an error is one line."""

    def flag(self, name: str, **settings: Any) -> None:
        self.add_argument(*dict.fromkeys((name, "--" + name[2:].replace("-", "_"))), **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text: str) -> int:
    """Parses an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value

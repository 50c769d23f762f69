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


def add_request_flags(parser: Parser) -> None:
    """Adds the flags of benchmarks on the built-in workloads."""
    parser.flag("--prompts-per-workload", type=int, default=2, metavar="N")
    parser.flag("--runs", type=int, default=1, metavar="N")
    parser.flag("--max-new-tokens", type=int, default=64, metavar="N")
    parser.flag("--temperature", type=float, default=0.0)
    parser.flag("--seed", type=int, default=0)
    parser.flag("--backend", default="torch")
    parser.flag("--dtype", default="auto")
    parser.flag("--draft", default="auto")


def positive(text: str) -> int:
    """Parses an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value

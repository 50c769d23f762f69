"""Command lines from the fields of configurations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config")


def setting(text: str, default: Any = MISSING, flag: str | None = None) -> Any:
    """A field with its help; `flag`: another name on the command line."""
    return field(default=default, metadata={"help": text, "flag": flag})


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


TYPES: dict[str, Callable[[str], Any]] = {
    "int": int, "float": float, "str": str, "Path": Path, "tuple[int, ...]": _numbers, "tuple[str, ...]": _words,
}  # fmt: skip


class Command(argparse.ArgumentParser):
    """Parses configurations; prints a ValueError as one line."""

    def add_settings(self, kind: type) -> None:
        for each in fields(kind):
            if "help" not in each.metadata:
                continue
            name = each.metadata["flag"] or each.name
            required = each.default is MISSING
            default = None if required else each.default
            self.add_argument(
                *dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")),
                dest=each.name,
                type=TYPES[str(each.type).removesuffix(" | None")],
                required=required,
                default=default,
                help=each.metadata["help"] + (f" (default {default})" if default not in (None, ()) else ""),
            )

    def run(self, argv: Sequence[str] | None, work: Callable[[dict[str, Any]], None]) -> int:
        try:
            work(vars(self.parse_args(argv)))
        except ValueError as error:
            print(f"{self.prog}: {error}", file=sys.stderr)
            return 2
        return 0


def show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

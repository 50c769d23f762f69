"""Reads the flags that change a request's logits: biases, penalties and the structure of the output."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.values import split_list

if TYPE_CHECKING:
    from tandem.speculation.types import Structure

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def processing(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of SamplingParams that change logits, as far as the flags give them. Raises ValueError."""
    given = {name: value for name in PENALTIES if (value := getattr(args, name)) is not None}
    return given | {"logit_bias": biases(args.logit_bias), "structure": structure(args)}


def biases(text: str | None) -> tuple[tuple[int, float], ...]:
    """The (token id, bias) pairs of a list such as `50256:-100,11:2.5`, by id. Raises ValueError."""
    pairs = [part.partition(":") for part in split_list(text)]
    try:
        return tuple(sorted((int(token), float(bias)) for token, _, bias in pairs))
    except ValueError:
        raise ValueError(f"logit_bias: {text!r} is not a list of id:bias, as in 50256:-100,11:2.5") from None


def structure(args: argparse.Namespace) -> Structure | None:
    """Returns what --json_schema or --regex asks of the output. Raises ValueError."""
    from tandem.speculation.types import Structure, StructureKind

    if args.json_schema is None:
        return None if args.regex is None else Structure(StructureKind.REGEX, args.regex)
    try:
        return Structure(StructureKind.JSON_SCHEMA, Path(args.json_schema).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"json_schema: {args.json_schema} cannot be read: {error}") from None

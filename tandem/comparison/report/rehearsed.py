"""Labels what a comparison shows if its steps took the times of a device that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from tandem.comparison.report.blocks import Block, Details, Plot, Section, Table
from tandem.comparison.report.reading import JSON

LABEL = "rehearsed"
Labelled = TypeVar("Labelled", bound="Block | Section")


def is_rehearsed(comparison: JSON) -> bool:
    """Whether any server took the step times of another device. An older file says nothing, and none did."""
    return any(server["model"].get("rehearsals") for server in comparison["servers"].values())


def labelled(comparison: JSON, blocks: Sequence[Labelled]) -> list[Labelled]:
    """The same blocks; if the comparison was rehearsed, captions of tables and titles of plots say so."""
    return [_labelled(block) for block in blocks] if is_rehearsed(comparison) else list(blocks)


def _labelled(block: Labelled) -> Labelled:
    match block:
        case Table(caption=caption, brief=brief):
            short = brief and (_named(brief[0]), brief[1])
            return replace(block, caption=_named(caption), brief=short)
        case Plot(title=title):
            return replace(block, title=_named(title))
        case Details(blocks=folded):
            return replace(block, blocks=tuple(_labelled(each) for each in folded))
        case Section(blocks=inner):
            return replace(block, blocks=tuple(_labelled(each) for each in inner))
    return block


def _named(caption: str) -> str:
    return f"{caption} ({LABEL})" if caption else caption

"""The base's answers by prompt, marked where one differs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.comparison.analysis.comparison import Comparison
from tandem.comparison.analysis.words import joined, name_in_sentence
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.identity import first_difference
from tandem.comparison.measuring.records import Measurement


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the architectures `names`."""

    names: str
    before: str
    marked: str = ""  # its first difference from the first answer
    after: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The different answers to one prompt, plain decoding's first."""

    title: str
    answers: tuple[Answer, ...]


def answers(found: Comparison) -> list[Prompt]:
    """Returns the base's first run, differing answers first."""
    by_prompt: dict[str, dict[tuple[int, ...], list[tuple[str, Measurement]]]] = {}
    for record in sorted(found.records, key=lambda record: record.architecture != AUTOREGRESSIVE.name):
        if record.condition == found.base.name and not record.run and (of := record.measurement):
            same = by_prompt.setdefault(record.prompt, {}).setdefault(of.output_token_ids, [])
            same.append((record.architecture, of))
    shown = [Prompt(prompt, _beside(list(of.values()))) for prompt, of in by_prompt.items()]
    return sorted(shown, key=lambda prompt: len(prompt.answers) == 1)


def _beside(groups: Sequence[Sequence[tuple[str, Measurement]]]) -> tuple[Answer, ...]:
    first = groups[0][0][1].text
    found = []
    for group in groups:
        text, names = group[0][1].text, joined([name_in_sentence(name) for name, _ in group])
        start = first_difference(first, text)
        if start is None:
            found.append(Answer(names, text))
        else:
            word = re.match(r"\s*\S*", text[start:])
            end = start + (word.end() if word else 0)
            found.append(Answer(names, text[:start], text[start:end], text[end:]))
    return tuple(found)

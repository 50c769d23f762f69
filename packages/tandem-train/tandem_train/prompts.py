"""Training prompts of the built-in kinds by (seed, index), from the grammar words.json.

A draft learns from the target's continuations, so prompts need only cover the kinds of users' text, with and without
the chat template. A test keeps the built-in evaluation prompts out (`tandem/comparison/measuring/prompts.json`).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tandem.comparison.measuring.workloads import Prompt

_FIELD = re.compile(r"\[\[([^\]]+)\]\]")
_SUM = re.compile(r"(\w+)([+-]\d+)")
_RANGE = re.compile(r"(\d+)-(\d+)")


@cache
def grammar() -> dict[str, Any]:
    """`kinds`: weight and the lists of prompts, with and without the chat template. `lists`: of texts with fields."""
    read: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
    return read


def training_prompt(seed: int, index: int, own: Mapping[str, Sequence[str]]) -> Prompt:
    """Prompt `index` of the stream `seed`. `own`: the target's `instructions`, and `raw` texts without a template."""
    rng, kinds = random.Random(f"{seed}/{index}"), dict(grammar()["kinds"])
    texts = {"own": own.get("instructions"), "raw": own.get("raw")}
    for name in texts:
        if not texts[name]:
            del kinds[name]
    kind = rng.choices(list(kinds), [each["weight"] for each in kinds.values()])[0]
    if kind == "own":
        return Prompt("", kind, rng.choice(own["instructions"]), True)
    if kind == "raw":
        return Prompt("", kind, rng.choice(own["raw"])[: rng.randint(12, 240)], False)
    raw, chat = (kinds[kind][name] for name in ("raw", "chat"))
    name = rng.choice([*raw, *chat])
    return Prompt("", kind, _filled(rng, f"[[@{name}]]", {}), name in chat)


def _filled(rng: random.Random, text: str, known: dict[str, str]) -> str:
    """Fills each field of a text.

    [[@list]]: one of a list, filled. [[@list*3]]: three of them. [[2-9]]: a number. [[a|b]]: either. [[x=...]]: one of
    these, called x. [[x]]: that again. [[x+2]]: the number x, and 2.
    """

    def value(match: re.Match[str]) -> str:
        name, bound, field = match[1].rpartition("=")
        if field in known:
            return known[field]
        if (found := _SUM.fullmatch(field)) and found[1] in known:
            return str(int(known[found[1]]) + int(found[2]))
        made = _drawn(rng, field)
        if bound:
            known[name] = made
        return made

    return _FIELD.sub(value, text)


def _drawn(rng: random.Random, field: str) -> str:
    if field.startswith("@"):
        name, _, count = field[1:].partition("*")
        return ", ".join(_filled(rng, text, {}) for text in rng.sample(grammar()["lists"][name], int(count or 1)))
    if found := _RANGE.fullmatch(field):
        return str(rng.randint(int(found[1]), int(found[2])))
    return rng.choice(field.split("|"))

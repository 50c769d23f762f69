"""Training prompts of the built-in kinds by (seed, index).

A draft learns from the target's continuations, so prompts need only cover the kinds of users' text, with and without
the chat template. words.json has their words. A test keeps the built-in evaluation prompts out
(`tandem/comparison/measuring/prompts.json`).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FIELD = re.compile(r"\[\[([^\]]+)\]\]")
Made = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """`kind` groups prompts in reports; `chat`: uses the target's chat template."""

    kind: str
    text: str
    chat: bool


@dataclass(frozen=True, slots=True)
class OwnTexts:
    """Texts by the target: instructions, and raw texts without a template."""

    instructions: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()


def training_prompt(seed: int, index: int, own: OwnTexts = OwnTexts()) -> TrainingPrompt:
    """Prompt `index` of the stream `seed`."""
    rng = random.Random(f"{seed}/{index}")
    lacking = {name for name, texts in (("own", own.instructions), ("raw", own.raw)) if not texts}
    kinds = [kind for kind in WEIGHTS if kind not in lacking]
    kind = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
    if kind == "own":
        return TrainingPrompt(kind, rng.choice(own.instructions), True)
    if kind == "raw":
        return TrainingPrompt(kind, rng.choice(own.raw)[: rng.randint(12, 240)], False)
    return TrainingPrompt(kind, *MAKERS[kind](rng))


@cache
def _read() -> dict[str, list[str]]:
    lists: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
    return lists


def words(name: str) -> list[str]:
    """A list of words.json."""
    return _read()[name]


def _filled(rng: random.Random, text: str, /, **given: object) -> str:
    """Fills [[name]] from `given`, [[@list]] and [[@list*3]] from a list, [[2-9]] with a number, [[a|b]] with one."""

    def value(match: re.Match[str]) -> str:
        field = match[1]
        if field in given:
            return str(given[field])
        if field.startswith("@"):
            name, times, count = field[1:].partition("*")
            return ", ".join(rng.sample(words(name), int(count))) if times else rng.choice(words(name))
        if "|" in field:
            return rng.choice(field.split("|"))
        return str(rng.randint(*map(int, field.split("-"))))

    return _FIELD.sub(value, text)


def _one(rng: random.Random, name: str, /, **given: object) -> str:
    """One of the texts `name`, after filling all."""
    return rng.choice([_filled(rng, text, **given) for text in words(name)])


def _drawn(rng: random.Random, **lists: str) -> dict[str, object]:
    """A word of each list, by field name."""
    return {field: rng.choice(words(name)) for field, name in lists.items()}


def _sentence(rng: random.Random) -> str:
    text = rng.choice(words("sentences"))
    fields = dict(
        m="@moods", y="1801-2015", o="chains|bolts|rails|hinges", n="@names", n2="@names", s="@surnames", c="@cities",
        st="@streets", k="12-980", d="@days", p="2-11", h="5-21]]:[[05|15|20|35|40|50", r="@roles", th="@things",
        mo="@months",
    )  # fmt: skip
    return text.format(**{name: _filled(rng, f"[[{field}]]") for name, field in fields.items()})


def _passage(rng: random.Random, most: int = 5) -> str:
    return " ".join(_sentence(rng) for _ in range(rng.randint(2, most)))


# Counting and lists


def _count(rng: random.Random) -> Made:
    step, start = rng.choice((1, 1, 1, 2, 3, 5, 10, -1)), rng.randint(0, 120)
    ends = rng.choice(("\n", "\n", ", ", " ", ".\n", ")\n"))
    head = _one(rng, "count_heads", by=abs(step), start=start)
    return head + "".join(f"{start + step * i}{ends}" for i in range(rng.randint(5, 14))).rstrip(" "), False


def _labelled(rng: random.Random) -> Made:
    start, label = rng.randint(1, 40), rng.choice(words("labels"))
    tail = _one(rng, "label_tails")
    return "".join(f"{label} {start + i}{tail}\n" for i in range(rng.randint(3, 8))), False


def _arithmetic(rng: random.Random) -> Made:
    a, sign = rng.randint(2, 15), rng.choice("x+-*")
    value: Callable[[int], int] = {"x": a.__mul__, "*": a.__mul__, "+": a.__add__, "-": lambda i: 100 - i}[sign]
    first = 100 if sign == "-" else a
    head = _one(rng, "arithmetic_heads", title=f"Table of {a}:\n" if sign in "x*" else "Exercises\n")
    return head + "".join(f"{first} {sign} {i} = {value(i)}\n" for i in range(1, rng.randint(4, 9))), False


def _weekly(rng: random.Random) -> Made:
    samples = [rng.sample(words(name), 8) for name in ("cities", "names")]
    names = rng.choice((words("days"), words("months"), *samples))
    head, value, mark = _one(rng, "weekly_heads"), _one(rng, "weekly_values"), rng.choice(("", "- ", "* "))
    return f"{head}\n\n" + "".join(f"{mark}{n}: {value}\n" for n in names[: rng.randint(2, 5)]), False


def _ask_list(rng: random.Random) -> Made:
    return _filled(rng, "[[@list_verbs]] [[@listable]][[, | ]][[@extras]]."), True


def _ask_count(rng: random.Random) -> Made:
    return _one(rng, "ask_count", a=rng.randint(0, 40), b=rng.randint(50, 120)), True


# Code


def _class(rng: random.Random) -> Made:
    noun, fields = rng.choice(words("nouns")).capitalize(), rng.sample(words("fields"), rng.randint(2, 4))
    first, second = fields[:2]
    text = f"class {noun}:\n    def __init__(self, {', '.join(fields)}):\n"
    text += "".join(f"        self.{f} = {f}\n" for f in fields)
    return text + rng.choice((
        f"\n    def get_{first}(self):\n        return self.{first}\n\n    def get_{second}",
        f"\n    def set_{first}(self, {first}):\n        self.{first} = {first}\n\n    def",
        f"\n    @property\n    def {first}_text(self):\n        return str(self.{first})\n\n    @property\n",
        "",
    )), False  # fmt: skip


def _tests(rng: random.Random) -> Made:
    verb, noun = rng.choice(words("verbs")), rng.choice(words("nouns"))
    call = f"{verb}_{noun}"
    if rng.random() < 0.5:
        text = f"import pytest\nfrom {noun}s import {call}\n\n"
        text += "".join(
            f"def test_{call}_{n}():\n    assert {call}({i}) == {i * rng.choice((1, 2, 3))}\n\n"
            for i, n in enumerate(("zero", "one", "two")[: rng.randint(1, 3)])
        )
        return text + "def test_", False
    text = f"import unittest\n\nclass Test{noun.capitalize()}(unittest.TestCase):\n"
    text += "".join(
        f"    def test_{call}_{n}(self):\n        self.assertEqual({call}({i}), {i + 1})\n\n"
        for i, n in enumerate(("first", "second", "third")[: rng.randint(1, 3)])
    )
    return text + "    def test_", False


def _function(rng: random.Random) -> Made:
    given = _drawn(rng, verb="verbs", noun="nouns", field="fields")
    return _one(rng, "functions", Noun=str(given["noun"]).capitalize(), **given), False


def _records(rng: random.Random) -> Made:
    fields = rng.sample(words("fields"), rng.randint(1, 2))
    rows = []
    for i in range(1, rng.randint(3, 6)):
        row: dict[str, object] = {"id": i, "name": rng.choice(words("names"))}
        row |= {f: rng.choice((rng.randint(1, 99), rng.choice(words("roles")), True)) for f in fields}
        rows.append(row)
    if rng.random() < 0.3:
        text = ",".join(rows[0]) + "\n" + "".join(",".join(str(v) for v in row.values()) + "\n" for row in rows)
        return text, False
    return "[\n" + "".join(f"  {json.dumps(row)},\n" for row in rows), False


def _ask_code(rng: random.Random) -> Made:
    return _one(rng, "ask_code", **_drawn(rng, task="tasks", language="languages")), True


def _ask_edit(rng: random.Random) -> Made:
    a, b = rng.sample(words("fields"), 2)
    given = {"a": a, "b": b, **_drawn(rng, noun="nouns", verb="verbs")}
    body = _filled(rng, words("edited")[0], **given)
    return f"{_one(rng, 'ask_edit', **given)}\n\n{body}", True


# Extraction


def _repeat(rng: random.Random) -> Made:
    return f"{_one(rng, 'ask_repeat')}\n\n{_passage(rng)}\n", True


def _quote(rng: random.Random) -> Made:
    others = ["the time", "the date", "the price", "the weather", "the place"]
    subject = rng.choice([*words("names"), *words("cities"), *others])
    return f"{_one(rng, 'ask_quote', subject=subject)}\n\n{_passage(rng, 6)}\n", True


def _form(rng: random.Random) -> Made:
    fields = dict(
        name="[[@names]] [[@surnames]]", city="[[@cities]]", street="[[@streets]]", number="[[1-220]]",
        code="[[A|B|C|D|E|F|G|H]][[J|K|L|M|N|P|Q|R]]-[[1000-99999]]", phone="[[100-999]] [[100-999]] [[1000-9999]]",
    )  # fmt: skip
    note = _one(rng, "forms", **{name: _filled(rng, field) for name, field in fields.items()})
    return f"{_one(rng, 'ask_form')}\n\n{note}\n", True


def _ask_about(rng: random.Random) -> Made:
    facts = _passage(rng, 4)
    return f"{facts}\n\n{_one(rng, 'ask_about', who=rng.choice(words('names')))}", True


# Chat and prose


def _question(rng: random.Random) -> Made:
    t, u = rng.sample(words("topics"), 2)
    return rng.choice(words("questions")).format(t=t, u=u), True


def _advice(rng: random.Random) -> Made:
    given = _drawn(rng, t="topics", who="acquaintances")
    who = str(given["who"])
    return _one(rng, "advice", Who=who.capitalize(), child=who.replace("I", "a child"), **given), True


def _ask_story(rng: random.Random) -> Made:
    given = _drawn(rng, who="people", where="places", what="objects", mood="moods", season="seasons")
    return _one(rng, "ask_story", **given), True


def _opening(rng: random.Random) -> Made:
    given = _drawn(rng, who="people", where="places", what="objects", name="names", mood="moods")
    texts = [_sentence(rng) if text == "[[sentence]]" else _filled(rng, text, **given) for text in words("openings")]
    start = rng.choice(texts)
    return start + (f" {_one(rng, 'opening_tails', **given)}" if rng.random() < 0.3 else ""), False


# Without the target's template


def _in_a_template(rng: random.Random) -> Made:
    """An instruction in another model's template, perhaps after an earlier turn."""
    text = _pick(rng, *_ASKED)[0]
    template = rng.choice(words("templates"))
    if rng.random() < 0.25:
        greeting, reply = _one(rng, "greetings"), rng.choice(words("replies"))
        return f"{template.format(t=greeting)} {reply}\n{template.format(t=text)}", False
    return template.format(t=text), False


def _fragment(rng: random.Random) -> Made:
    """The start of a text in another language than English, or of a translation."""
    sentence = _filled(rng, "[[@names]] [[lives in|went to|likes|comes from]] [[@cities]].")
    text = rng.choice(words("fragments"))
    fields = {"n": "@names", "c": "@cities", "p": "2-20", "d": "1-30"}
    return text.format(s=sentence, **{name: _filled(rng, f"[[{field}]]") for name, field in fields.items()}), False


def _pick(rng: random.Random, *makers: Callable[[random.Random], Made]) -> Made:
    return rng.choice(makers)(rng)


_ASKED = (_ask_list, _ask_count, _ask_code, _ask_about, _question, _advice, _ask_story)  # instructions of all kinds
WEIGHTS: Mapping[str, float] = {
    "counting_and_lists": 0.13, "code": 0.18, "extraction": 0.13, "chat": 0.16, "prose": 0.17, "own": 0.1,
    "templates": 0.07, "languages": 0.04, "raw": 0.12,
}  # fmt: skip
MAKERS: Mapping[str, Callable[[random.Random], Made]] = {
    "counting_and_lists": lambda rng: _pick(
        rng, _count, _labelled, _arithmetic, _weekly, _ask_list, _ask_list, _ask_count
    ),
    "code": lambda rng: _pick(rng, _class, _tests, _function, _records, _ask_code, _ask_code, _ask_edit),
    "extraction": lambda rng: _pick(rng, _repeat, _quote, _quote, _form, _ask_about),
    "chat": lambda rng: _pick(rng, _question, _question, _advice),
    "prose": lambda rng: _pick(rng, _ask_story, _opening),
    "templates": _in_a_template,
    "languages": _fragment,
}

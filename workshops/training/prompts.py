"""Makes training prompts of the built-in kinds from a seed: the same (seed, index) always gives the same prompt.

A draft learns from the target's continuations, so the prompts only have to cover the kinds of text that users will ask
for. The built-in evaluation prompts (`tandem/comparison/measuring/prompts.py`) are not among them; a test checks this.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.workshops.training import raw_prompts, words


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A prompt. `kind` groups prompts in reports; `chat`: the text is wrapped in the target's chat template."""

    kind: str
    text: str
    chat: bool


@dataclass(frozen=True, slots=True)
class OwnTexts:
    """What the target wrote itself: instructions, and raw texts without a template."""

    instructions: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()


def training_prompt(seed: int, index: int, own: OwnTexts = OwnTexts()) -> TrainingPrompt:
    """Returns prompt `index` of the stream `seed`."""
    rng = random.Random(f"{seed}/{index}")
    lacking = {name for name, texts in (("own", own.instructions), ("raw", own.raw)) if not texts}
    kinds = [kind for kind in WEIGHTS if kind not in lacking]
    kind = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
    if kind == "own":
        return TrainingPrompt(kind, rng.choice(own.instructions), True)
    text, chat = raw_prompts.own_raw(rng, own.raw) if kind == "raw" else MAKERS[kind](rng)
    return TrainingPrompt(kind, text, chat)


def _pick(rng: random.Random, *makers: Callable[[random.Random], tuple[str, bool]]) -> tuple[str, bool]:
    return rng.choice(makers)(rng)


def _sentence(rng: random.Random) -> str:
    return rng.choice(words.SENTENCES).format(
        m=rng.choice(words.MOODS), y=rng.randint(1801, 2015), o=rng.choice(("chains", "bolts", "rails", "hinges")),
        n=rng.choice(words.NAMES), n2=rng.choice(words.NAMES), s=rng.choice(words.SURNAMES), c=rng.choice(words.CITIES),
        st=rng.choice(words.STREETS), k=rng.randint(12, 980), d=rng.choice(words.DAYS), p=rng.randint(2, 11),
        h=f"{rng.randint(5, 21)}:{rng.choice(('05', '15', '20', '35', '40', '50'))}", r=rng.choice(words.ROLES),
        th=rng.choice(words.THINGS), mo=rng.choice(words.MONTHS),
    )  # fmt: skip


def _passage(rng: random.Random, most: int = 5) -> str:
    return " ".join(_sentence(rng) for _ in range(rng.randint(2, most)))


# Counting and lists


def _count(rng: random.Random) -> tuple[str, bool]:
    step, start = rng.choice((1, 1, 1, 2, 3, 5, 10, -1)), rng.randint(0, 120)
    ends = rng.choice(("\n", "\n", ", ", " ", ".\n", ")\n"))
    head = rng.choice(("", "", f"Count by {abs(step)}:\n", "Numbers:\n", f"Counting from {start}:\n"))
    return head + "".join(f"{start + step * i}{ends}" for i in range(rng.randint(5, 14))).rstrip(" "), False


def _labelled(rng: random.Random) -> tuple[str, bool]:
    start = rng.randint(1, 40)
    label = rng.choice(("Item", "Step", "Day", "Page", "Room", "Chapter", "Week", "Line", "No.", "Test", "Question"))
    tail = rng.choice((":", "", ".", f": {rng.choice(words.THINGS)}", f" - {rng.choice(words.NOUNS)}"))
    return "".join(f"{label} {start + i}{tail}\n" for i in range(rng.randint(3, 8))), False


def _arithmetic(rng: random.Random) -> tuple[str, bool]:
    a, sign = rng.randint(2, 15), rng.choice("x+-*")
    value: Callable[[int], int] = {"x": a.__mul__, "*": a.__mul__, "+": a.__add__, "-": lambda i: 100 - i}[sign]
    first = 100 if sign == "-" else a
    head = rng.choice(("", "Practice sheet\n", "Arithmetic:\n", f"Table of {a}:\n" if sign in "x*" else "Exercises\n"))
    return head + "".join(f"{first} {sign} {i} = {value(i)}\n" for i in range(1, rng.randint(4, 9))), False


def _weekly(rng: random.Random) -> tuple[str, bool]:
    names = rng.choice(
        (words.DAYS, words.MONTHS, tuple(rng.sample(words.CITIES, 8)), tuple(rng.sample(words.NAMES, 8)))
    )
    head = rng.choice(("Schedule", "Timetable", "Prices", "Rota", "Totals", "Plan", "Attendance"))
    value = rng.choice((f"{rng.randint(6, 11)}:00 to {rng.randint(12, 20)}:00", f"${rng.randint(3, 80)}.00", "closed",
                        f"{rng.randint(2, 60)}", f"Room {rng.randint(1, 40)}", rng.choice(words.NAMES)))  # fmt: skip
    mark = rng.choice(("", "- ", "* "))
    return f"{head}\n\n" + "".join(f"{mark}{n}: {value}\n" for n in names[: rng.randint(2, 5)]), False


def _ask_list(rng: random.Random) -> tuple[str, bool]:
    verb = rng.choice(("List", "Name", "Write down", "Give me", "Write", "Please list", "Tell me"))
    return f"{verb} {rng.choice(words.LISTABLE)}{rng.choice((', ', ' '))}{rng.choice(words.EXTRAS)}.", True


def _ask_count(rng: random.Random) -> tuple[str, bool]:
    a, b = rng.randint(0, 40), rng.randint(50, 120)
    return rng.choice((
        f"Count from {a} to {b}.", f"Write the numbers from {a} to {b}, one per line.", f"Count down from {b} to {a}.",
        f"Write the {rng.randint(2, 15)} times table up to {rng.randint(10, 20)}.",
        f"Write the alphabet, and after every letter {rng.choice(('a name', 'a country', 'a food', 'a city', 'a job'))}.",
        f"For every {rng.choice(('day of the week', 'month', 'season'))}, write {rng.choice(('a color', 'a meal', 'a holiday', 'a chore', 'the weather'))}.",
    )), True  # fmt: skip


# Code


def _class(rng: random.Random) -> tuple[str, bool]:
    noun, fields = rng.choice(words.NOUNS).capitalize(), rng.sample(words.FIELDS, rng.randint(2, 4))
    text = f"class {noun}:\n    def __init__(self, {', '.join(fields)}):\n"
    text += "".join(f"        self.{f} = {f}\n" for f in fields)
    style = rng.choice(("get", "set", "property", "none"))
    if style == "get":
        text += f"\n    def get_{fields[0]}(self):\n        return self.{fields[0]}\n\n    def get_{fields[1]}"
    elif style == "set":
        text += f"\n    def set_{fields[0]}(self, {fields[0]}):\n        self.{fields[0]} = {fields[0]}\n\n    def"
    elif style == "property":
        text += (
            f"\n    @property\n    def {fields[0]}_text(self):\n        return str(self.{fields[0]})\n\n    @property\n"
        )
    return text, False


def _tests(rng: random.Random) -> tuple[str, bool]:
    verb, noun = rng.choice(words.VERBS), rng.choice(words.NOUNS)
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


def _function(rng: random.Random) -> tuple[str, bool]:
    verb, noun, field = rng.choice(words.VERBS), rng.choice(words.NOUNS), rng.choice(words.FIELDS)
    return rng.choice((
        f"def {verb}_{noun}({field}):\n    ", f'def {verb}_{noun}({noun}, {field}):\n    """',
        f"import os\nimport json\n\ndef {verb}_{noun}s(path):\n", f"def {verb}_{noun}s({noun}s):\n    result = []\n    for ",
        f"function {verb}{noun.capitalize()}({field}) {{\n  ", f"const {noun}s = [\n  {{ id: 1, {field}: 'a' }},\n",
        f"SELECT {field} FROM {noun}s WHERE ", f"CREATE TABLE {noun}s (\n  id INTEGER PRIMARY KEY,\n  {field} ",
        f"<ul>\n  <li>{noun}</li>\n  <li>{field}</li>\n", f"# {noun.capitalize()} {field}\n\n## Installation\n\n",
        f"public class {noun.capitalize()} {{\n    private String {field};\n\n    public ",
        f"#!/bin/bash\n# {verb} every {noun}\nfor ", f"if __name__ == '__main__':\n    {noun} = ",
    )), False  # fmt: skip


def _records(rng: random.Random) -> tuple[str, bool]:
    fields = rng.sample(words.FIELDS, rng.randint(1, 2))
    rows = []
    for i in range(1, rng.randint(3, 6)):
        row: dict[str, object] = {"id": i, "name": rng.choice(words.NAMES)}
        row |= {f: rng.choice((rng.randint(1, 99), rng.choice(words.ROLES), True)) for f in fields}
        rows.append(row)
    if rng.random() < 0.3:
        text = ",".join(rows[0]) + "\n" + "".join(",".join(str(v) for v in row.values()) + "\n" for row in rows)
        return text, False
    return "[\n" + "".join(f"  {json.dumps(row)},\n" for row in rows), False


def _ask_code(rng: random.Random) -> tuple[str, bool]:
    task, language = rng.choice(words.TASKS), rng.choice(words.LANGUAGES)
    return rng.choice((
        f"Write a {language} function that {task}.", f"Write a {language} program that {task}.",
        f"Show me how to write a {language} function that {task}, with an example.",
        f"Write a {language} function that {task}. Explain how it works.",
        f"How do I write code in {language} that {task}?", f"I need a {language} function that {task}. Add comments.",
        f"Write unit tests for a {language} function that {task}.",
        f"Write a {language} class for a {rng.choice(words.NOUNS)} with the fields {', '.join(rng.sample(words.FIELDS, 3))}.",
    )), True  # fmt: skip


def _ask_edit(rng: random.Random) -> tuple[str, bool]:
    (a, b), noun, verb = rng.sample(words.FIELDS, 2), rng.choice(words.NOUNS), rng.choice(words.VERBS)
    body = f"def {verb}_{noun}({a}, {b}):\n    total = {a} * {rng.randint(2, 9)}\n    if {b} > {rng.randint(3, 60)}:\n"
    body += f"        total = total {rng.choice('+-*')} {b}\n    return total\n"
    ask = rng.choice((
        f"Rename `{a}` to `{rng.choice(words.NOUNS)}` in this function. Answer with the code only.",
        "Add type hints to this function.", "Add a docstring to this function and change nothing else.",
        "Explain what this function does, line by line.", "Rewrite this function in JavaScript.",
        f"Change this function so that `{b}` has a default value.", "Find the mistake in this code.",
    ))  # fmt: skip
    return f"{ask}\n\n{body}", True


# Extraction


def _repeat(rng: random.Random) -> tuple[str, bool]:
    ask = rng.choice((
        "Repeat this text word for word.", "Copy the following text exactly.", "Write the text below again, unchanged.",
        "Repeat the following sentences without any change.", "Quote this passage in full.",
        "Correct any spelling mistakes in this text and write it again.", "Print the text below exactly as it is.",
    ))  # fmt: skip
    return f"{ask}\n\n{_passage(rng)}\n", True


def _quote(rng: random.Random) -> tuple[str, bool]:
    subject = rng.choice(words.NAMES + words.CITIES + ("the time", "the date", "the price", "the weather", "the place"))
    ask = rng.choice((
        f"Copy the sentence that mentions {subject}.", f"Which sentence speaks of {subject}? Quote it word for word.",
        f"Read the text and answer: what does it say about {subject}?", "Quote the most important sentence of this text.",
        "Copy out the first sentence of this text.", "Write down the last sentence of this text, word for word.",
        "Summarize this text in one sentence.", "Summarize this text in its own words.", "What is this text about?",
        "Turn this text into a list of facts.", "List the people named in this text.", "List all numbers in this text.",
        "Who does what in this text? Make a list.", "List the places and dates named in this text.",
    ))  # fmt: skip
    return f"{ask}\n\n{_passage(rng, 6)}\n", True


def _form(rng: random.Random) -> tuple[str, bool]:
    name, city = f"{rng.choice(words.NAMES)} {rng.choice(words.SURNAMES)}", rng.choice(words.CITIES)
    street, number = rng.choice(words.STREETS), rng.randint(1, 220)
    code = f"{rng.choice('ABCDEFGH')}{rng.choice('JKLMNPQR')}-{rng.randint(1000, 99999)}"
    phone = f"{rng.randint(100, 999)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}"
    note = rng.choice((
        f"{name} of {number} {street}, {city}, ordered {rng.randint(2, 30)} {rng.choice(words.THINGS)} under {code}. Phone {phone}.",
        f"Please call {name} at {phone} about ticket {code}. The address is {number} {street} in {city}.",
        f"Booking {code}: {name}, {city}, arriving {rng.choice(words.DAYS)} at {rng.randint(6, 22)}:00, phone {phone}.",
    ))  # fmt: skip
    ask = rng.choice((
        "Extract the name, the city and the phone number.", "Write this note as a list of fields and values.",
        "Convert this note to JSON.", "Make a table with the columns field and value.",
        'Rewrite this as lines of the form "key: value".', "What are the name, the address and the code in this note?",
    ))  # fmt: skip
    return f"{ask}\n\n{note}\n", True


def _ask_about(rng: random.Random) -> tuple[str, bool]:
    facts = [_sentence(rng) for _ in range(rng.randint(2, 4))]
    who = rng.choice(words.NAMES)
    return f"{' '.join(facts)}\n\n{rng.choice(('What happened first?', 'Where does this take place?', f'What will {who} do?', 'Explain this in other words.', 'Rewrite this in the past tense.', 'Translate this into simple English.'))}", True  # fmt: skip


# Chat and prose


def _question(rng: random.Random) -> tuple[str, bool]:
    t, u = rng.sample(words.TOPICS, 2)
    return rng.choice(words.QUESTIONS).format(t=t, u=u), True


def _advice(rng: random.Random) -> tuple[str, bool]:
    t, who = (
        rng.choice(words.TOPICS),
        rng.choice(("my brother", "my boss", "a friend", "my neighbour", "my daughter", "I")),
    )
    return rng.choice((
        f"I need advice about {t}. {who.capitalize()} asked about it and I do not know what to say.",
        f"How do I explain {t} to {who.replace('I', 'a child')}?", f"Why does everyone talk about {t}?",
        f"I keep having trouble with {t}. What should I try first?", f"What is the easiest way to start with {t}?",
        f"Tomorrow I have to speak about {t}. How should I begin?", f"Why is {t} important?", f"Hello! Do you know {t}?",
        f"What would happen without {t}?", f"Write an email to {rng.choice(words.NAMES)} about {t}.",
    )), True  # fmt: skip


def _ask_story(rng: random.Random) -> tuple[str, bool]:
    who, where, what = rng.choice(words.PEOPLE), rng.choice(words.PLACES), rng.choice(words.OBJECTS)
    mood, season = rng.choice(words.MOODS), rng.choice(words.SEASONS)
    return rng.choice((
        f"Write a story about {who} in {where}.", f"Write the first paragraph of a novel in which {who} finds {what}.",
        f"Write a poem about {season}.", f"Write a {mood} poem about {who}.", f"Tell me a short story about {what}.",
        f"Write a letter from {who} to {rng.choice(words.PEOPLE)} about {where}.", f"Describe {where} on a {mood} day.",
        f"Write a fairy tale with {who}, {what} and {where}.", f"Write a diary entry by {who} after {season}.",
        f"Write a dialogue between {who} and {rng.choice(words.PEOPLE)} in {where}.",
        f"Write the ending of a story about {who} and {what}.", f"Write four lines about {season} in {where}.",
    )), True  # fmt: skip


def _opening(rng: random.Random) -> tuple[str, bool]:
    who, where, what = rng.choice(words.PEOPLE), rng.choice(words.PLACES), rng.choice(words.OBJECTS)
    name, mood = rng.choice(words.NAMES), rng.choice(words.MOODS)
    start = rng.choice((
        f"It was a {mood} evening when {who} came to {where}.", f"{name} had never seen {what} like this one before.",
        f"Once there was {who} who lived in {where}.", f"On the last day of {rng.choice(words.MONTHS)}, {name} left {where}.",
        f"Nobody in {rng.choice(words.CITIES)} believed {name}'s story about {what}.", f'"Where did you find {what}?" asked {name}.',
        f"For {rng.randint(2, 40)} years {who} had kept {what} in {where}.", f"The {mood} light fell on {what}, and {name} stopped.",
        f"My father used to say that {who} never returns to {where}.", f"When the rain stopped, {name} was alone in {where}.",
        f"There is {where} near {rng.choice(words.CITIES)} where people still speak of {who}.", f"{_sentence(rng)}",
        f"The history of {rng.choice(words.TOPICS)} begins", f"In {rng.randint(1850, 2010)}, the people of {rng.choice(words.CITIES)}",
    ))  # fmt: skip
    return start + (" " + rng.choice((f"{name} said nothing.", "It began with a sound.", "At first nothing happened.",
                                     f"Then {rng.choice(words.PEOPLE)} appeared.")) if rng.random() < 0.3 else ""), False  # fmt: skip


_ASKED = (_ask_list, _ask_count, _ask_code, _ask_about, _question, _advice, _ask_story)  # instructions of all kinds
WEIGHTS: Mapping[str, float] = {
    "counting_and_lists": 0.13, "code": 0.18, "extraction": 0.13, "chat": 0.16, "prose": 0.17, "own": 0.1,
    "templates": 0.07, "languages": 0.04, "raw": 0.12,
}  # fmt: skip
MAKERS: Mapping[str, Callable[[random.Random], tuple[str, bool]]] = {
    "counting_and_lists": lambda rng: _pick(
        rng, _count, _labelled, _arithmetic, _weekly, _ask_list, _ask_list, _ask_count
    ),
    "code": lambda rng: _pick(rng, _class, _tests, _function, _records, _ask_code, _ask_code, _ask_edit),
    "extraction": lambda rng: _pick(rng, _repeat, _quote, _quote, _form, _ask_about),
    "chat": lambda rng: _pick(rng, _question, _question, _advice),
    "prose": lambda rng: _pick(rng, _ask_story, _opening),
    "templates": lambda rng: raw_prompts.in_a_template(rng, _pick(rng, *_ASKED)[0]),
    "languages": raw_prompts.fragment,
}

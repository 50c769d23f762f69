"""Structures that a hostile caller would send, and random ones: for tests, the fuzzer and the soak's clients."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable

from tandem.speculation.types import Structure, StructureKind

JSON, REGEX = StructureKind.JSON_SCHEMA, StructureKind.REGEX
CHOICE, GRAMMAR = StructureKind.CHOICE, StructureKind.GRAMMAR


def schema(**value: object) -> Structure:
    return Structure(JSON, json.dumps(value))


def choice(*values: str) -> Structure:
    return Structure(CHOICE, json.dumps(values))


def _parts(count: int) -> list[str]:
    """Expressions of which any two leave many possibilities open."""
    return [f"(.|\\n)*.*{string.ascii_lowercase[i]}.{{{i + 5}}}" for i in range(count)]


LETTERS = string.ascii_lowercase[:20]
PATTERNS = schema(allOf=[{"type": "string", "pattern": f".*{c}.{{{i + 5}}}$"} for i, c in enumerate(LETTERS)])
"""Takes 25 s of processor time, and 85 MB more in each of the first, if nobody stops it."""
SLOW = Structure(GRAMMAR, "start: X\nX: " + " & ".join(f"/{part}/" for part in _parts(20)))
"""Takes more than a minute of processor time."""


def late(count: int) -> Structure:
    """Compiles in a millisecond; what may follow `count` times "z" would take minutes to find out."""
    bomb = " & ".join(f"/{part}/" for part in _parts(20))
    return Structure(GRAMMAR, f'start: X\nX: /z*/ | "{"z" * count}" ({bomb})')


LATE = late(16)

HOSTILE: dict[str, Structure] = {
    "patterns": PATTERNS,
    "intersections": SLOW,
    "late": LATE,
    "endless reference": Structure(JSON, '{"$ref": "#"}'),
    "references in a ring": schema(
        **{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "nested schemas": Structure(JSON, '{"items":' * 300 + "{}" + "}" * 300),
    "nested unions": Structure(JSON, '{"anyOf":[' * 60 + "{}" + "]}" * 60),
    "long strings": schema(type="string", minLength=10**6, maxLength=10**9),
    "many items": schema(type="array", items={"type": "array", "minItems": 10**6}, minItems=10**6),
    "many properties": schema(type="object", properties={f"p{i}": {"type": "integer"} for i in range(2000)}),
    "patterns of names": schema(
        type="object",
        patternProperties={f".*{part}": {"pattern": part} for part in _parts(12)},
        additionalProperties=True,
    ),
    "overlapping unions": schema(
        anyOf=[{"type": "object", "properties": {f"a{i}": {}, "a": {"enum": [i]}}} for i in range(300)]
    ),
    "odd numbers": schema(type="number", multipleOf=1e-300, minimum=-1e308, maximum=1e308),
    "nothing": schema(type="string", minLength=5, maxLength=4),
    "not": schema(**{"not": {"not": {"pattern": "(a|b)*a(a|b){20}"}}}),
    "repetitions": Structure(REGEX, "((((a{1000}){1000}){1000}){1000}){1000}"),
    "optional repetitions": Structure(REGEX, "((((a?){500}){500}b?){500}){500}"),
    "late choice": Structure(REGEX, "(.*a.{40}b.*){20}"),
    "many letters": Structure(REGEX, r"(\p{L}|\p{Greek}|[^\p{L}]){1,4000}"),
    "many words": Structure(REGEX, "|".join(f"w{i}x*" for i in range(6000))),
    "parentheses": Structure(REGEX, "(" * 30000 + "a" + ")" * 30000),
    "a large count": Structure(REGEX, "a{4294967295}"),
    "looking ahead": Structure(REGEX, "(?=a*)(?!b)a+"),
    "ring of rules": Structure(GRAMMAR, "start: a\na: b\nb: a"),
    "ring of terminals": Structure(GRAMMAR, "start: A\nA: B\nB: A"),
    "ambiguous": Structure(GRAMMAR, 'start: s\ns: s s | s s s | "a" | /a+/ | '),
    "empty rules": Structure(GRAMMAR, "start: a*\na: b* c*\nb: c?\nc: b?"),
    "plain intersections": Structure(
        GRAMMAR, "start: X\nX: " + " & ".join(f"/.*{c}.{{9}}/" for c in "abcdefghijklmnopqrst")
    ),
    "negations": Structure(GRAMMAR, "start: X\nX: " + " & ".join(f"~(/{part}/)" for part in _parts(12))),
    "many rules": Structure(
        GRAMMAR, "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b" r{i + 1}' for i in range(1500)) + '\nr1500: "c"'
    ),
    "nested groups": Structure(GRAMMAR, "start: " + "(" * 30000 + '"a"' + ")" * 30000),
    "substrings": Structure(GRAMMAR, "start: X\nX: %regex " + json.dumps({"substring_chars": "abcdefgh" * 5000})),
    "tokens by number": Structure(GRAMMAR, "start: <[0-300]> <[*]> <[4294967295]>"),
    "many choices": choice(*(f"choice {i} {'x' * 40}" for i in range(1100))),
    "prefixes": choice(*("a" * i for i in range(1, 320))),
    "one long choice": choice("ab" * 32000),
    "odd letters": choice("\0", "\ud800\udc00", '"', "\\", "\n", "𝔄" * 100),
}


def random_structure(chance: random.Random) -> Structure:
    """A structure of any kind: sound, broken or hostile."""
    kinds: dict[StructureKind, Callable[[], str]] = {
        JSON: lambda: json.dumps(_schema(chance, chance.randrange(1, 6))),
        REGEX: lambda: _expression(chance, chance.randrange(1, 7)),
        GRAMMAR: lambda: _grammar(chance),
        CHOICE: lambda: json.dumps([_word(chance, 40) for _ in range(chance.randrange(1, 200))]),
    }
    kind = chance.choice(list(kinds))
    text = kinds[kind]()
    if kind in (REGEX, GRAMMAR) and chance.random() < 0.2:  # broken somewhere
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice('()[]{}|&~*?"\\/\n\0<>%') + text[at + chance.randrange(3) :]
    return Structure(kind, text or "x")


def _word(chance: random.Random, most: int) -> str:
    return "".join(chance.choices('abc xyz01\n"\\é€', k=chance.randrange(1, most)))


def _expression(chance: random.Random, depth: int) -> str:
    if depth <= 0:
        return chance.choice(["a", "b", ".", "[a-f]", "[^a]", r"\d", r"\w", r"\p{L}", "(.|\\n)*", "x*", "é", ""])
    inner = [_expression(chance, depth - chance.randrange(1, 4)) for _ in range(chance.randrange(1, 5))]
    low = chance.choice([0, 1, 3, 50, 2000])
    return chance.choice(
        [
            "".join(inner),
            f"({'|'.join(inner)})",
            f"({inner[0]})*",
            f"({inner[0]}){{{low},{low + chance.choice([0, 9, 900])}}}",
        ]
    )


def _schema(chance: random.Random, depth: int) -> dict[str, object]:
    made: dict[str, object] = {}
    several: Callable[[], list[object]] = lambda: [_schema(chance, depth - 1) for _ in range(chance.randrange(1, 4))]  # noqa: E731
    options: dict[str, Callable[[], object]] = {
        "type": lambda: chance.choice(
            ["string", "object", "array", "integer", "number", "boolean", "null", ["string", "null"]]
        ),
        "pattern": lambda: _expression(chance, depth),
        "enum": lambda: [_word(chance, 9), chance.randrange(99), None],
        "minLength": lambda: chance.choice([0, 3, 10**5]),
        "maxLength": lambda: chance.choice([1, 30, 10**8]),
        "maximum": lambda: chance.choice([-1, 7.5, 1e300]),
        "multipleOf": lambda: chance.choice([3, 0.1, 1e-9]),
        "format": lambda: chance.choice(["date-time", "email", "uuid", "uri", "hostname"]),
        "$ref": lambda: chance.choice(["#", "#/$defs/a", "#/nowhere", "http://127.0.0.1/x"]),
        "$defs": lambda: {"a": _schema(chance, depth - 1)},
        "properties": lambda: {_word(chance, 5): each for each in several()},
        "patternProperties": lambda: {_expression(chance, 1): each for each in several()},
        "additionalProperties": lambda: chance.choice([False, True, _schema(chance, depth - 1)]),
        "required": lambda: [_word(chance, 5)],
        "items": lambda: _schema(chance, depth - 1),
        "minItems": lambda: chance.choice([0, 2, 10**4]),
        "anyOf": several,
        "oneOf": several,
        "allOf": several,
        "not": lambda: _schema(chance, depth - 1),
    }
    for name in chance.sample(sorted(options), k=chance.randrange(1, 5) if depth > 0 else 0):
        made[name] = options[name]()
    return made


def _grammar(chance: random.Random) -> str:
    rules, terminals = ["start", "p", "q", "r"][: chance.randrange(1, 5)], ["A", "B", "C"][: chance.randrange(1, 4)]

    def term() -> str:
        return chance.choice([*rules, *terminals, '"ab"', '"("', f"/{_expression(chance, 2).replace('/', '') or 'a'}/"])

    def body(operators: list[str]) -> str:
        made = chance.choice([" ", " | "]).join(
            term() + chance.choice(["", "", "*", "+", "?"]) for _ in range(chance.randrange(1, 5))
        )
        return f"({made}) {chance.choice(operators)} ({term()})" if chance.random() < 0.3 else made

    lines = [f"{name}: {body(['|'])}" for name in rules] + [f"{name}: {body(['|', '&', '& ~'])}" for name in terminals]
    return "\n".join([*lines, *(["%ignore /[ ]+/"] if chance.random() < 0.2 else [])])

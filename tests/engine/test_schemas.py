"""Schemas that zod, pydantic and openai write are enforced: by masks, or by a check of what is complete.

schemas.json was written by zod 4.6.7 (`zod4`: z.toJSONSchema), zod-to-json-schema 3.25.2 (`zod3`, also for OpenAI),
pydantic 2.14.3 and openai 3.54.0 (`openai-strict`). The reference is jsonschema, with the schema as it was written.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from jsonschema.validators import validator_for

from tandem.engine.structures import Structures
from tandem.speculation.draws import StructureFailed
from tandem.speculation.processing import Matcher
from tandem.speculation.types import InvalidField, Structure, StructureKind
from tests.toy import END, VOCAB_SIZE, ToyTokenizer

pytest.importorskip("llguidance")

SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text())
STRING = {"type": "string"}


def structure(schema: Any) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, json.dumps(schema))


async def matcher_of(schema: Any) -> Matcher:
    return await Structures(ToyTokenizer(), VOCAB_SIZE).matcher(structure(schema))


def written(matcher: Matcher, chance: random.Random) -> str:
    """An output that the masks allow, short if they let it be; "" if there is none that is short."""
    said = b""
    while len(said) < 600:
        allowed = set(np.flatnonzero(matcher.mask()).tolist())
        if END in allowed:
            assert matcher.advance(END)
            return said.decode()
        ends = [each for each in b'"]}' if each in allowed]
        letters = [each for each in allowed if chr(each).isalnum() and each < 128]
        taken = chance.choice(ends if ends and chance.random() < 0.5 else letters or sorted(allowed))
        assert matcher.advance(taken)
        said += bytes([taken])
    return ""


@pytest.mark.parametrize("name", SCHEMAS)
async def test_outputs_match_the_schema_as_it_was_written_or_end_with_the_place_that_they_break(name: str) -> None:
    schema, structures, ends = SCHEMAS[name], Structures(ToyTokenizer(), VOCAB_SIZE), list[str]()
    for seed in range(4):
        matcher = await structures.matcher(structure(schema))
        try:
            ends.append(written(matcher, random.Random(seed)))
        except StructureFailed as failed:
            assert "cannot be enforced: the output breaks it at $" in str(failed)
    for output in filter(None, ends):
        old = '"exclusiveMaximum": true' in json.dumps(schema)  # zod-to-json-schema's form for OpenAI
        kind = jsonschema.Draft4Validator if old else validator_for(schema, jsonschema.Draft202012Validator)
        errors = kind(schema).iter_errors(json.loads(output))
        # Python's expressions lack \p, which llguidance enforces
        assert not [each for each in errors if r"\p" not in str(each.validator_value)], output


def follows(matcher: Matcher, text: str) -> bool:
    """Whether the masks allow a text, and the end after it."""
    try:
        return all(matcher.mask()[byte] and matcher.advance(byte) for byte in text.encode()) and bool(
            matcher.mask()[END]
        )
    except StructureFailed:
        return False


def names(**rules: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": rules, "additionalProperties": {"type": "number"}}


PASSWORD = r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{3,5}$"


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({**STRING, "format": "cuid2"}, ['"any"'], ["1"]),
        ({"type": "array", "items": STRING, "uniqueItems": True}, ['["a","b"]'], ['["a","a"]']),
        ({**names(type="string"), "minProperties": 2}, ['{"a":1,"b":1}'], ['{"a":1}', '{"a":1,"a":2}']),
        (names(enum=["a", "b"]), ['{"b":1}', "{}"], ['{"c":1}', '{"a":"x"}']),
        (names(pattern="^k_"), ['{"k_a":1}'], ['{"a":1}']),
        (names(minLength=2, maxLength=3), ['{"ab":1}'], ['{"a":1}', '{"abcd":1}']),
        ({**STRING, "pattern": PASSWORD}, ['"aB1"'], ['"ab1"', '"AB"', '"aB1aB1"']),
        ({**STRING, "pattern": r"^(?=a)[a-z]$|^12$"}, ['"a"', '"12"'], ['"b"', '"1"']),
        ({**STRING, "pattern": r"^(?!no)[a-z]+$"}, ['"yes"'], ['"nope"']),
        ({**STRING, "pattern": r"^(a|b)\1$"}, ['"aa"'], ['"ab"']),
        (
            {"$defs": {"c": {"enum": [1, 2]}}, "uniqueItems": True, "items": {"$ref": "#/$defs/c"}, "type": "array"},
            ["[2,1]"],
            ["[1,2,1]", "[1,1]"],
        ),
        ({"type": "integer", "multipleOf": 5}, ["123451234512345", "-5"], ["4"]),
        ({"type": "integer", "maximum": 2**64 - 1, "minimum": 0}, ["18446744073709551615"], ["-1"]),
        ({"type": "integer", "not": {"const": 5}}, ["55", "6"], ["5"]),
        ({"oneOf": [STRING, {**STRING, "maxLength": 1}]}, ['"ab"'], ['"a"']),
        (
            {"type": "object", "dependencies": {"a": ["b"]}, "additionalProperties": {"type": "null"}},
            ['{"b":null}', '{"a":null,"b":null}'],
            ['{"a":null}'],
        ),
        ({"type": "number", "maximum": 5, "exclusiveMaximum": True, "not": {"const": 2}}, ["3", "2.5"], ["5", "2"]),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}, "type": ["string", "null"]}, ['"a"'], ['"ab"']),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}, ["[null,[]]"], ["[1]"]),
    ],
)
async def test_what_a_grammar_cannot_say_is_checked_when_the_output_is_whole(
    schema: Any, allowed: list[str], refused: list[str]
) -> None:
    structures = Structures(ToyTokenizer(), VOCAB_SIZE)
    for text in allowed + refused:
        assert follows(await structures.matcher(structure(schema)), text) == (text in allowed), text


async def test_an_output_that_breaks_what_was_left_out_ends_with_its_place() -> None:
    matcher = await matcher_of({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    for byte in b'{"a":[1,1]}':
        assert matcher.allows(byte) and matcher.advance(byte)
    for _ in range(2):
        with pytest.raises(StructureFailed, match=r"the output breaks it at \$\.a: \[1, 1\] has non-unique elements"):
            matcher.mask()


@pytest.mark.parametrize(
    ("schema", "text", "goes_on"),
    [
        ({"type": "number"}, "1" * 20, False),
        ({"type": "number"}, "0." + "1" * 19, True),
        ({"type": "array", "items": {"type": "number"}}, "[2,0." + "3" * 20, False),
        (STRING, '"' + "1" * 30, True),
        ({"const": 10**30}, "1" + "0" * 25, True),  # a digit is all that may come
    ],
)
async def test_a_number_ends_after_twenty_digits_in_a_row(schema: Any, text: str, goes_on: bool) -> None:
    matcher = await matcher_of(schema)
    assert all(matcher.mask()[byte] and matcher.advance(byte) for byte in text.encode())
    assert bool(matcher.mask()[list(b"0123456789")].any()) == goes_on


@pytest.mark.parametrize(
    ("schema", "place", "why"),
    [
        ({"type": "foo"}, "#/properties/a/items/anyOf/1", "Invalid type: foo"),
        ({"$ref": "https://example.com/x"}, "#/properties/a/items/anyOf/1/$ref", "not present"),
        ({**STRING, "pattern": "(?=("}, "#/properties/a/items/anyOf/1/pattern", "neither llguidance nor Python has it"),
        ({"patternProperties": {"^a": STRING, "b$": {}}}, "#/properties/a/items/anyOf/1", "not disjoint"),
    ],
)
async def test_a_schema_that_cannot_be_served_is_refused_with_the_place(schema: Any, place: str, why: str) -> None:
    whole = {"type": "object", "properties": {"b": STRING, "a": {"type": "array", "items": {"anyOf": [{}, schema]}}}}
    with pytest.raises(InvalidField, match=f"the json_schema cannot be enforced: at {re.escape(place)}: .*{why}"):
        await matcher_of(whole)

"""Numbers of JSON end: their digits in a row are bounded, and no value that a schema asks for is lost."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import numpy as np
import pytest

from tandem.engine.structure_schemas import EXPONENT_DIGITS, MOST_DIGITS, JsonText, digit_tokens, digits_needed
from tandem.engine.structure_worker import Follower, grammar, vocabulary_of
from tests.toy import END, VOCAB_SIZE, ToyTokenizer

VOCABULARY = vocabulary_of(ToyTokenizer().spelling(), VOCAB_SIZE, END)
NUMBER = {"type": "number"}
SHORT = {"type": "number", "minimum": 0, "maximum": 1}


def following(schema: Any) -> Follower:
    text = json.dumps(schema)
    numbers = JsonText(digit_tokens(VOCABULARY, VOCAB_SIZE), digits_needed(text), lambda t: bytes([t]))
    matcher = llguidance.LLMatcher(VOCABULARY, grammar("json_schema", text), log_level=0)
    return Follower(matcher, VOCAB_SIZE, (END,), numbers)


def next_of(follower: Follower) -> set[int]:
    bits = np.unpackbits(np.frombuffer(follower.mask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def written(follower: Follower, text: str) -> bool:
    """Whether the masks allow a text, and its end."""
    return all(byte in next_of(follower) and follower.advance(byte) for byte in text.encode()) and END in next_of(
        follower
    )


def longest(follower: Follower, wanted: bytes) -> str:
    """What comes of taking the first of the bytes `wanted` that the masks allow, until none is."""
    said = b""
    while len(said) < 200 and (allowed := [byte for byte in wanted if byte in next_of(follower)]):
        assert follower.advance(allowed[0])
        said += bytes(allowed[:1])
    return said.decode()


@pytest.mark.parametrize("schema", [NUMBER, SHORT, {"type": "integer"}, {"type": "number", "minimum": 5}])
@pytest.mark.parametrize("wanted", [b"1234567890", b"9.0123", b".eE-170", b"0.7e+"])
def test_no_number_goes_on_for_ever(schema: Any, wanted: bytes) -> None:
    said = longest(following(schema), wanted)
    assert len(said) <= 2 * MOST_DIGITS + EXPONENT_DIGITS + 4
    json.loads(said)


@pytest.mark.parametrize(
    "text",
    [
        "-1.7976931348623157e+308",
        "2.2250738585072014E-308",
        "0.12345678901234567",
        "18446744073709551615",
        "0",
        "-0.5e7",
    ],
)
def test_every_float_and_every_integer_of_64_bits_can_be_written(text: str) -> None:
    assert written(following(NUMBER), text)
    assert written(following({"type": "array", "items": NUMBER}), f"[{text},{text}]")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": 10**30}, "1" + "0" * 30),
        ({"enum": [10**19, 10**24]}, "1" + "0" * 24),
        ({"enum": ["1" * 40]}, '"' + "1" * 40 + '"'),
        ({"type": "string"}, '"' + "1" * 40 + r"\"" + "2" * 40 + '"'),
        ({"type": "object", "properties": {"1" * 30: NUMBER}, "required": ["1" * 30]}, '{"' + "1" * 30 + '":1e5}'),
        ({"type": "array", "items": {"type": ["boolean", "null", "number"]}}, "[true,null,false,1]"),
    ],
)
def test_what_a_schema_has_itself_and_strings_are_not_bounded(schema: Any, text: str) -> None:
    assert written(following(schema), text)


def test_a_number_that_needs_more_digits_gets_them() -> None:
    assert digits_needed('{"enum": [%s]}' % 10**25) == 26 and digits_needed("0." + "1" * 30) == 30
    assert (
        digits_needed('{"const": %s}' % ("1" * 999)) == 400 and digits_needed("[1") == digits_needed("") == MOST_DIGITS
    )


def test_a_token_that_begins_with_a_digit_comes_after_fewer_digits_than_the_limit_alone() -> None:
    texts = (b"1", b"22", b"333", b"a4", b"")

    class Vocabulary:
        def decode_bytes(self, tokens: list[int]) -> bytes:
            return texts[tokens[0]]

    digits = digit_tokens(Vocabulary(), 5)
    assert digits == 0b111
    limit = JsonText(digits, 4, lambda token: texts[token])
    for taken, left in ((1, 0b11111), (0, 0b11111), (0, 0b11000)):
        limit.take(taken)
        limit.limit(mask := bytearray([0b11111]), may_end=True)
        assert mask[0] == left
    limit.limit(alone := bytearray([0b00111]), may_end=False)
    assert alone[0] == 0b00111


def backs(seed: int) -> None:
    """What was taken back does not count, wherever it stood."""
    chance, follower, said = random.Random(seed), following({"type": "array", "items": NUMBER}), list[int]()
    for _ in range(150):
        if said and chance.random() < 0.3:
            count = chance.randrange(1, len(said) + 1)
            follower.back(count)
            del said[-count:]
        allowed = sorted(next_of(follower) - {END})
        if not allowed:
            continue
        token = chance.choice([each for each in allowed if each in b"0123456789"] or allowed)
        assert follower.advance(token)
        said.append(token)
        afresh = following({"type": "array", "items": NUMBER})
        assert all(afresh.advance(each) for each in said) and afresh.mask() == follower.mask()


def test_what_was_taken_back_does_not_count() -> None:
    for seed in range(3):
        backs(seed)

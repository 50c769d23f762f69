"""Prefixes and drafts between two vocabularies, whose tokenizers are small enough to be seen through."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.vocabularies.mapping import Prefix, Translation, Vocabulary, translation

TEXTS = st.lists(
    st.sampled_from(["the", " there", " other", "he", " é", "né", "\n", "  ", " x", "<e>", "語"]), min_size=1
)
HERE = ("the", " the", "re", " o", "ther", "é", "ne", " x", "  ")
THERE = ("th", " ther", "e", "er", " other", " é", "\n", "x", "語", "ere")


def vocabulary(pieces: tuple[str, ...], special: str = "", padding: int = 0) -> Vocabulary:
    """All bytes and then `pieces`; words begin with their space, and take the longest pieces that fit."""
    tokens = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in pieces]
    ids = {text: token for token, text in enumerate(tokens)}
    end = len(tokens) if special else None

    def encode(text: str) -> list[int]:
        found = []
        for part in re.findall(r"<e>|\n| ?[^\s<]+|[^\S\n]+(?!\S)|\s|<", text):
            rest = part.encode()
            if special and part == special:
                found.append(len(tokens))
                continue
            while rest:
                length = max(n for n in range(1, len(rest) + 1) if rest[:n] in ids)
                found.append(ids[rest[:length]])
                rest = rest[length:]
        return found

    spelt = (*tokens, *([special.encode()] if special else []), *[b""] * padding)
    return Vocabulary(spelt, encode, frozenset([end] if end else []), end=end)


PAIR = translation(vocabulary(HERE, "<e>"), vocabulary(THERE, "<e>"))


@settings(max_examples=150, deadline=None)
@given(parts=TEXTS, steps=st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_a_prefix_that_grows_and_is_taken_back_has_the_tokens_of_its_whole_text(parts, steps):
    tokens = PAIR.target.encode("".join(parts))
    prefix = Prefix(PAIR)
    for length in (*(step % len(tokens) + 1 for step in steps), len(tokens)):
        said = b"".join(map(PAIR.target.bytes_of, tokens[:length])).decode("utf-8", "replace")
        expected = None if said.endswith("\N{REPLACEMENT CHARACTER}") else PAIR.draft.encode(said)
        assert prefix.follow(tokens[:length]) == expected


def test_a_prefix_that_leaves_its_path_follows_the_new_one():
    prefix = Prefix(PAIR)
    for text in ("the other there", "the other né", " x the there é", "the other there there"):
        assert prefix.follow(PAIR.target.encode(text)) == PAIR.draft.encode(text)


@settings(max_examples=100, deadline=None)
@given(parts=TEXTS)
def test_a_draft_is_the_same_bytes_up_to_the_first_token_that_the_target_does_not_have(parts):
    drafted = PAIR.draft.encode("".join(parts))
    mapped = PAIR.drafted(drafted)
    for mine, theirs in zip(mapped, drafted, strict=False):
        assert PAIR.target.bytes_of(mine) == PAIR.draft.bytes_of(theirs)
    if len(mapped) < len(drafted):
        assert PAIR.draft.bytes_of(drafted[len(mapped)]) not in PAIR.target.token_bytes


def test_special_tokens_are_special_on_both_sides_and_the_ends_are_one():
    here, there = vocabulary(HERE, "<e>"), vocabulary((*THERE, "<e>"), "</s>")
    pair = translation(here, there)
    assert pair.drafted([there.end, 256 + len(THERE)]) == (here.end,)  # the text "<e>" is no special token


def test_padding_stands_for_nothing_and_vocabularies_that_differ_by_it_are_the_same():
    pair = translation(vocabulary(HERE, padding=3), vocabulary(HERE, padding=9))
    count = 256 + len(HERE)
    assert pair.drafted(range(count)) == tuple(range(count)) and pair.drafted([count]) == ()
    assert Prefix(pair).follow([*pair.target.encode("the"), count, count + 500]) == pair.draft.encode("the")


def test_a_tokenizer_that_puts_a_space_before_texts_is_not_given_one_twice():
    def encode(text: str) -> list[int]:
        return list(b" " + text.encode())

    pair = translation(vocabulary(HERE), Vocabulary(tuple(bytes([byte]) for byte in range(256)), encode))
    prefix, tokens = Prefix(pair), pair.target.encode("the there other")
    for length in range(1, len(tokens) + 1):
        followed = prefix.follow(tokens[:length])
        assert followed is not None and bytes(followed) == b" " + b"".join(map(pair.target.bytes_of, tokens[:length]))


def test_texts_begin_as_the_drafts_do():
    here, there = vocabulary(HERE, "<e>"), vocabulary(THERE, "</s>")
    begun = Translation(
        Vocabulary(here.token_bytes, here.encode, here.special, (here.end or 0,)),
        Vocabulary(there.token_bytes, there.encode, there.special, (there.end or 0,)),
        {},
        False,
    )
    assert Prefix(begun).follow([here.end or 0, *here.encode("the")]) == [there.end, *there.encode("the")]


@pytest.mark.parametrize("pieces", [(), HERE])
def test_a_vocabulary_maps_to_itself(pieces):
    mine = vocabulary(pieces, "<e>")
    assert translation(mine, mine).back == {token: token for token in range(len(mine.token_bytes))}

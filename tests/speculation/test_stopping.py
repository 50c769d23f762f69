"""Where a generation ends: nothing past a stop, and no difference how the tokens came in rounds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.speculation.stopping import Stopping
from tandem.speculation.types import FinishReason
from tests.speculation import laws

EOS, STOP = 0, 1
PIECES = {EOS: "", STOP: "<stop>", 2: "a", 3: "b", 4: "ab", 5: "aab", 6: "x", 7: "é", 8: "axb", 9: " "}


class Pieces:
    """Each token has a text of its own. Token 10 is the first half of a character, completed by any other."""

    HALF = 10

    def __init__(self) -> None:
        self._half = False

    def push(self, token: int) -> str:
        before = "\N{CAT}" if self._half else ""
        self._half = token == self.HALF
        return before + PIECES.get(token, "")

    def flush(self) -> str:
        half, self._half = self._half, False
        return "\N{REPLACEMENT CHARACTER}" if half else ""


def stopping(max_new_tokens: int = 100, strings: Sequence[str] = ()) -> Stopping:
    return Stopping(Pieces(), max_new_tokens, frozenset({EOS}), frozenset({STOP}), tuple(strings))


TOKENS = st.lists(st.sampled_from([2, 3, 4, 5, 6, 7, 8, 9, Pieces.HALF]) | st.integers(0, 10), max_size=24)
STRINGS = st.lists(st.text("abx é", min_size=1, max_size=4), max_size=3)


@settings(laws.repeatable, max_examples=250)
@given(tokens=TOKENS, strings=STRINGS, length=st.integers(1, 20), cuts=st.sets(st.integers(0, 24)))
def test_what_is_emitted_does_not_depend_on_how_rounds_are_cut(tokens, strings, length, cuts):
    margins = [float(i) for i in range(len(tokens))]

    def emitted(bounds: list[int]) -> tuple:
        stop = stopping(length, strings)
        chunks = [stop.push(tokens[a:b], margins[a:b]) for a, b in itertools.pairwise(bounds)]
        return (
            [t for c in chunks for t in c.token_ids],
            [m for c in chunks for m in c.margins],
            "".join(c.text for c in chunks),
            stop.reason,
            stop.emitted,
            stop.remaining,
        )

    singly = emitted(list(range(len(tokens) + 1)))
    assert emitted([0, *sorted(c for c in cuts if c < len(tokens)), len(tokens)]) == singly
    assert emitted([0, len(tokens)]) == singly


@settings(laws.repeatable, max_examples=250)
@given(tokens=TOKENS, strings=STRINGS, length=st.integers(1, 20))
def test_nothing_is_emitted_past_the_first_stop_and_nothing_before_it_is_lost(tokens, strings, length):
    stop = stopping(length, strings)
    chunks = [stop.push([t]) for t in tokens]
    got, text = [t for c in chunks for t in c.token_ids], "".join(c.text for c in chunks)

    # By hand: the whole text after each token, nothing held back.
    whole, pieces, expected, reason = "", Pieces(), [], None
    for token in tokens:
        expected.append(token)
        if token in (EOS, STOP):
            reason = FinishReason.END_OF_SEQUENCE if token == EOS else FinishReason.STOP_TOKEN
            break
        whole += pieces.push(token)
        if any(s in whole for s in strings):
            reason = FinishReason.STOP_STRING
            break
        if len(expected) == length:
            reason = FinishReason.LENGTH
            break
    if reason not in (None, FinishReason.STOP_STRING):
        whole += pieces.flush()
    cut = min((whole.find(s) for s in strings if s in whole), default=len(whole))

    assert (got, stop.reason) == (expected, reason)
    if reason:
        assert text == whole[:cut]
    else:  # what is held back may yet become a stop string, and nothing else is
        assert whole.startswith(text)
        held = whole[len(text) :]
        assert not held or any(s.startswith(held) for s in strings)

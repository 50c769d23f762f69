"""The common prefix of two token sequences, compared in blocks."""

from __future__ import annotations

import itertools

import pytest

from tandem.speculation.types import common

LENGTHS = (0, 1, 511, 512, 513, 1024, 1300)
TOKENS = list(range(1300))


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("differs", [*LENGTHS, 700])
def test_it_ends_at_the_first_difference_or_the_shorter_end(differs: int, kind: type) -> None:
    other = [token if at != differs else -1 for at, token in enumerate(TOKENS)]
    for left, right in itertools.product(LENGTHS, repeat=2):
        expected = min(left, right, differs)
        assert common(TOKENS[:left], kind(other[:right])) == expected
        for start in (0, 1, expected // 2, expected):
            assert common(kind(other[:left]), TOKENS[:right], min(start, expected)) == expected


def test_positions_below_the_start_are_not_compared() -> None:
    assert common([1, 2, 3], [9, 2, 4], 1) == 2
    assert common([1, 2], [9, 9, 9], 5) == 2

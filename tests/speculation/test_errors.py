"""Errors survive the way to another process, as a pool of processes sends them."""

from __future__ import annotations

import pickle

import pytest

from tandem.rpc.errors import BrokenContract
from tandem.speculation.errors import InvalidField, NoSuchOption, TandemError, TooLong, WrongType

ERRORS = (
    TandemError("UNAVAILABLE", "gone", 1.5, "DRAINING", (1, 2), "request-7"),
    InvalidField("top_p", "2 is above 1"),
    WrongType("seed", "an int", "x"),
    NoSuchOption("topp", "; did you mean top_p?"),
    TooLong("600 tokens are above 512"),
    BrokenContract("the target", InvalidField("accepted", "9 is above 3")),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_pickled_error_says_and_is_the_same(error: TandemError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error) and str(found) == str(error)
    assert vars(found) == vars(error) and found.outcome is error.outcome

"""Every field out of its limits is refused by name, and errors survive the way to another process."""

from __future__ import annotations

import math
import pickle

import pytest

from tandem.rpc.received_errors import BrokenContract
from tandem.speculation.errors import InvalidField, NoSuchOption, TandemError, TooLong, WrongType
from tandem.speculation.types import GenerationRequest, Proposer, SamplingParams, SpeculationStats, Verdict

WRONG = {
    "temperature": (-0.1, math.nan, math.inf),
    "top_k": (-1,),
    "top_p": (0.0, 1.0001, math.nan),
    "min_p": (-0.1, 1.1, math.nan),
    "seed": (-1, 2**64),
    "presence_penalty": (2.1,),
    "frequency_penalty": (-2.1, math.nan),
    "repetition_penalty": (0.0, 1e-45, 0.009, 2.1, math.nan),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_sampling_parameter_out_of_its_limits_is_named_with_its_value(field, value):
    with pytest.raises(InvalidField) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: {value}")


@pytest.mark.parametrize(
    "biases",
    [
        ((2, 1.0), (1, 1.0)),
        ((1, 1.0), (1, 1.0)),
        ((-1, 1.0),),
        ((1, 100.5),),
        ((1, math.nan),),
        tuple((i, 1.0) for i in range(1025)),
    ],
)
def test_biases_out_of_their_limits_are_refused(biases):
    with pytest.raises(InvalidField) as caught:
        SamplingParams(logit_bias=biases)
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", 0), ("max_total_tokens", 1), ("speculation_length", -1), ("stop_strings", ("ok", ""))],
)
def test_a_request_field_out_of_its_limits_is_named(field, value):
    with pytest.raises(InvalidField) as caught:
        GenerationRequest(text="hello", **{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_statistics_count_tokens_by_proposer():
    stats = SpeculationStats()
    stats.observe((7, 8, 9), Verdict((7, 1), 1), (Proposer.NGRAM, Proposer.NGRAM, Proposer.MODEL))
    stats.observe((7,), Verdict((7, 2), 1), (Proposer.MODEL,))
    stats.observe((), Verdict((3,), 0), ())
    assert stats.drafted_by == {"ngram": 2, "model": 2}
    assert stats.accepted_by == {"ngram": 1, "model": 1}


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

"""Every field out of its limits is refused by name."""

from __future__ import annotations

import math

import pytest

from tandem.speculation.types import (
    GenerationRequest,
    InvalidField,
    Proposer,
    SamplingParams,
    SpeculationStats,
    Verdict,
)

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
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("max_total_tokens", 1),
        ("speculation_length", -1),
        ("stop_strings", ("ok", "")),
    ],
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

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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 2.1),
        ("repetition_penalty", math.nan),
    ],
)
def test_a_sampling_parameter_out_of_its_limits_is_named_with_its_value(field, value):
    with pytest.raises(InvalidField) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: {value}")


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


@pytest.mark.parametrize("prompt", [{}, {"text": "hello", "token_ids": (1,)}])
def test_a_request_gives_exactly_one_of_text_and_tokens(prompt):
    with pytest.raises(InvalidField) as caught:
        GenerationRequest(**prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "limits",
    [
        {"temperature": 0.0},
        {"temperature": 1e9},
        {"top_k": 0},
        {"top_k": 10**9},
        {"top_p": 1.0},
        {"top_p": 1e-12},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"seed": 0},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)
def test_the_limits_themselves_are_allowed(limits):
    SamplingParams(**limits)


def test_the_smallest_request_is_allowed():
    GenerationRequest(token_ids=(0,), max_new_tokens=1, max_total_tokens=2, speculation_length=0, stop_strings=("x",))


def test_temperature_zero_and_only_zero_is_greedy():
    assert SamplingParams().greedy
    assert SamplingParams(temperature=-0.0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


def test_an_invalid_field_is_a_value_error():
    assert issubclass(InvalidField, ValueError)


def test_statistics_count_tokens_by_proposer():
    stats = SpeculationStats()
    stats.observe((7, 8, 9), Verdict((7, 1), 1), (Proposer.NGRAM, Proposer.NGRAM, Proposer.MODEL))
    stats.observe((7,), Verdict((7, 2), 1), (Proposer.MODEL,))
    stats.observe((), Verdict((3,), 0), ())
    assert stats.drafted_by == {"ngram": 2, "model": 2}
    assert stats.accepted_by == {"ngram": 1, "model": 1}

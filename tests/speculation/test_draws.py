"""Seeded draws: random access, exact pruning, warping sets, ties, bad logits, and values that may never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.speculation.draws import BadLogits, draw, gumbel, margin, surviving, words
from tandem.speculation.types import SamplingParams
from tests.speculation import laws


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


# --- noise ---


@laws.repeatable
@given(seed=laws.U64, position=st.integers(0, 2**63), token=st.integers(0, 300))
def test_the_word_of_a_token_is_philox_at_its_counter_wherever_one_starts(seed, position, token):
    key = np.array([seed, position], dtype=np.uint64)
    jumped = np.random.Philox(key=key, counter=token // 4).random_raw(4)[token % 4]
    stream = words(seed, position, token + 1)
    assert stream[token] == jumped == laws.reference_word(seed, position, token)
    assert np.array_equal(words(seed, position, 300)[: token + 1], stream[:300])


def test_gumbel_noise_is_finite_for_every_word():
    """Uniforms lie strictly inside (0, 1): the smallest and the largest words too have finite noise."""
    edges = [0, 1, 2**11, 2**12, 2**63, 2**64 - 2**13, 2**64 - 2**12 - 1, 2**64 - 2**12, 2**64 - 2**11, 2**64 - 1]
    noise = gumbel(np.array(edges, dtype=np.uint64))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) >= 0).all()
    assert noise[0] < -3.58  # -log(52 log 2)
    assert noise[-1] > 36.0  # a tail that a float32 uniform, ending near 17, would cut


# --- pruning and warping ---


@pytest.mark.parametrize("check", [laws.check_noise_resolution, laws.check_pruning, laws.check_survivors])
def test_noise_pruning_and_warping_are_those_of_a_naive_implementation(check):
    check(laws.OURS)


@settings(laws.repeatable, max_examples=12)
@given(seed=st.integers(0, 2**32), top_p=st.sampled_from([0.3, 0.9, 0.99, 0.9999]), top_k=st.sampled_from([0, 700]))
def test_a_nucleus_of_thousands_is_that_of_a_naive_implementation(seed, top_p, top_k):
    logits = np.round(np.random.default_rng(seed).normal(0, 1.0, 2500), 2).astype(np.float32)
    params = SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p)
    # The naive sum is quadratic; here a sorted cumulative one, in extended precision.
    scores = logits.astype(np.float64) / 1.3
    order = np.lexsort((np.arange(2500), -scores))[: top_k or None]
    mass = np.cumsum(np.exp(scores[order], dtype=np.longdouble))
    expected = order[: int(np.searchsorted(mass / mass[-1], top_p)) + 1]
    got = surviving(scores, params)
    assert got is not None
    assert got.tolist() == expected.tolist()


def test_masked_tokens_are_never_drawn():
    logits = array(0, -np.inf, 0, -np.inf)
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=2.0, top_k=3, top_p=0.99)):
        drawn = {draw(logits, laws.seeded(params, seed), 0) for seed in range(60)}
        assert drawn == {0, 2}


# --- greedy, extremes, bad logits ---


def test_greedy_ignores_the_other_parameters():
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=0.1), SamplingParams(min_p=1.0)):
        assert (draw(array(1, 5, 5, 2), params, 3), margin(array(1, 5, 5, 2), params, 3)) == (1, 0.0)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310])
def test_the_smallest_temperatures_that_params_take_can_be_drawn_with(temperature):
    assert draw(array(1, 3, 2), SamplingParams(temperature=temperature), 0) == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.5),
    ],
    ids=["greedy", "plain", "top-k", "top-p", "min-p"],
)
@pytest.mark.parametrize("vocabulary", [1, 3, 400])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_refused(params, vocabulary, bad):
    for at in {0, vocabulary // 2, vocabulary - 1}:
        logits = np.zeros(vocabulary, dtype=np.float32)
        logits[at] = bad
        with pytest.raises(BadLogits):
            draw(logits, params, 0)
    with pytest.raises(BadLogits):
        draw(np.full(vocabulary, -np.inf, dtype=np.float32), params, 0)


# --- what a draw depends on ---


@settings(laws.repeatable, max_examples=50)
@given(seed=laws.U64, position=st.integers(0, 2**40), data=st.data())
def test_a_draw_depends_on_nothing_but_seed_position_and_logits(seed, position, data):
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
    first = draw(laws.LOGITS, params, position)
    np.random.seed(data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(0, 3))):
        draw(laws.LOGITS, laws.seeded(params, data.draw(laws.U64)), data.draw(st.integers(0, 1000)))
    logits = np.pad(laws.LOGITS, 3)[3:-3]  # elsewhere in memory, not its own array
    assert draw(logits, params, position) == first
    assert logits.tolist() == laws.LOGITS.tolist()


# --- values that may never change: a replay of a recorded seed depends on them ---


def test_the_words_are_those_recorded():
    recorded = {
        (0, 0): [0x02F4BA6408E4D89B, 0x3DD62B0B9CA8C5B2, 0x1C8667A55D902E79, 0x907D7A052FD5B4DC, 0x809BF322883987C3],
        (7, 12): [0x6104EBD90775BBA1, 0xF2513B420659FBC4, 0x3C1C63A968CC423D, 0x5642EC4B662BBF00, 0x22A0E33A84C50E74],
        (2**64 - 1, 2**40): [0xD3E461B9A1D6347C, 0x20BEF29B1C34029F, 0x8ED55A4D1E0D73F9, 0xE1A991330FB0ECF2],
    }
    for (seed, position), values in recorded.items():
        assert words(seed, position, len(values)).tolist() == values


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (SamplingParams(), [22, 22, 22, 22, 22, 22, 22, 22]),
        (SamplingParams(1.0, seed=42), [292, 29, 221, 190, 42, 225, 212, 159]),
        (SamplingParams(0.7, top_k=20, seed=42), [292, 53, 53, 115, 239, 4, 22, 53]),
        (SamplingParams(1.5, top_p=0.9, seed=42), [292, 29, 221, 190, 42, 206, 212, 48]),
        (SamplingParams(1.0, min_p=0.1, seed=2**63), [119, 84, 97, 26, 172, 22, 144, 199]),
        (SamplingParams(0.8, 40, 0.95, 0.02, 123456789), [106, 22, 239, 239, 44, 22, 137, 115]),
    ],
    ids=["greedy", "plain", "top-k", "top-p", "min-p", "all"],
)
def test_the_draws_are_those_recorded(params, tokens):
    logits = (np.arange(300) * 7 % 31 / 8).astype(np.float32)
    assert [draw(logits, params, position) for position in range(8)] == tokens

"""The rejection rule: its law by enumeration, its seeded path by chi-square, its parts at their edges."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tandem.speculation import rejection, rules
from tandem.speculation.draws import BadLogits, Purpose, draw, uniform, words
from tandem.speculation.rejection import (
    FLOOR,
    Distribution,
    acceptance_probability,
    exactly,
    reject_seeded,
    residual,
    support,
    warped,
)
from tandem.speculation.types import Draft, InvalidField, Request, Rule, SamplingParams, SparseDistribution
from tests.speculation import rejection_laws as laws
from tests.speculation.laws import WARPINGS, reference_law, seeded

PLAIN = SamplingParams(temperature=1.0, seed=4)


LONG = [
    (laws.check_seeded_law, {"seeds": 10_000, "lowest": 1e-3}),
    (laws.check_seeded_law_of_one_position, {"seeds": 10_000, "lowest": 1e-3}),
    (laws.check_decisions_are_independent, {"seeds": 10_000}),
    (laws.check_acceptance_is_the_most_there_can_be, {"seeds": 6000}),
]


@pytest.mark.parametrize(
    ("check", "options"),
    [
        (laws.check_law_of_one_position, {}),
        (laws.check_law_of_sequences, {}),
        (laws.check_rounds_repeat, {}),
        (laws.check_only_tokens_of_the_target_are_proposed, {}),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in LONG),
    ],
)
def test_the_rule_keeps_its_laws(check, options):
    check(rejection, **options)


def random_distribution(seed: int) -> Distribution:
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(40, rng.integers(1, 9), replace=False))
    weights = rng.exponential(size=len(ids)) * (rng.random(len(ids)) < 0.7)
    weights[rng.integers(len(ids))] += 1e-3
    return Distribution(ids, weights / weights.sum())


@pytest.mark.parametrize("seed", range(30))
def test_acceptance_and_residual_share_out_the_target_exactly(seed):
    p, q = random_distribution(seed), random_distribution(seed + 1000)
    rest = residual(p, q)
    assert rest.p.sum() == pytest.approx(1, abs=1e-15) and (rest.p >= 0).all()
    refused = 1 - math.fsum(q.of(int(t)) * acceptance_probability(p.of(int(t)), q.of(int(t))) for t in support_of(q))
    for token in range(40):
        accepted = q.of(token) and q.of(token) * acceptance_probability(p.of(token), q.of(token))
        assert accepted + refused * rest.of(token) == pytest.approx(p.of(token), abs=1e-14)


def support_of(distribution: Distribution) -> np.ndarray:
    return distribution.ids[distribution.p > 0]


def test_a_residual_without_mass_is_the_target_itself():
    p = random_distribution(1)
    assert residual(p, p) is p
    more = Distribution(p.ids, p.p * (1 + 2.0**-50))  # as if rounding had given the draft more of everything
    assert residual(p, more) is p


def test_a_token_that_its_own_distribution_rules_out_is_an_error():
    with pytest.raises(ValueError, match="has probability 0"):
        acceptance_probability(0.5, 0.0)
    with pytest.raises(ValueError, match="has probability 0"):
        reject_seeded((1,), (SparseDistribution((2,), (1.0,)),), lambda i: np.zeros(4, np.float32), PLAIN, 3)


@pytest.mark.parametrize("params", WARPINGS, ids=str)
def test_p_is_the_warped_distribution_that_plain_decoding_draws_from(params):
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(0, 2, 12).astype(np.float32)
        p = warped(logits, params)
        assert list(p.ids) == sorted(p.ids)
        expected = reference_law(logits.tolist(), params)
        np.testing.assert_allclose([p.of(t) for t in range(12)], expected, rtol=0, atol=1e-14)
        assert p.of(draw(logits, seeded(params, seed), 5)) > 0


@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize("params", WARPINGS, ids=str)
def test_q_is_the_likeliest_of_the_warped_distribution_in_32_bits(params, most):
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(0, 2, 12).astype(np.float32)
        sent = support(logits, params, most)
        law = reference_law(logits.tolist(), params)
        best = sorted(range(12), key=lambda t: (-law[t], t))[:most]
        assert sent.token_ids == tuple(sorted(t for t in best if law[t] >= FLOOR * law.max()))
        q = exactly(sent)
        np.testing.assert_allclose(q.p, law[q.ids] / law[q.ids].sum(), rtol=1e-6)


def test_q_is_divided_by_the_exactly_rounded_sum():
    weights = tuple(float(np.float32(w)) for w in np.random.default_rng(0).exponential(size=64))
    total = float(sum(map(Fraction, weights)))
    q = exactly(SparseDistribution(tuple(range(64)), weights))
    assert q.p.tolist() == [w / total for w in weights]


def test_tokens_far_below_the_likeliest_are_not_sent():
    floor = float(np.log(FLOOR))
    sent = support(np.array([0.0, -200.0, -np.inf, floor + 0.01, floor - 0.01], dtype=np.float32), PLAIN)
    assert sent.token_ids == (0, 3)


def test_logits_without_a_largest_are_a_certain_guess_and_a_failed_verdict():
    broken = np.full(4, np.nan, dtype=np.float32)
    assert rejection.draft_token(broken, PLAIN, 3) == (0, SparseDistribution((0,), (1.0,)))
    with pytest.raises(BadLogits):
        reject_seeded((0,), (), lambda i: broken, PLAIN, 3)


def test_no_two_purposes_share_numbers_and_a_token_draws_as_ever():
    assert words(7, 3, 8).tolist() == words(7, 3, 8, Purpose.TOKEN).tolist()
    streams = np.concatenate([words(7, 3, 4000, purpose) for purpose in Purpose])
    assert len(np.unique(streams)) == len(streams)
    assert 0 < uniform(7, 3, Purpose.DRAFT) < 1
    assert uniform(7, 3, Purpose.DRAFT) == uniform(7, 3, Purpose.DRAFT)


# --- the two rules as a runner calls them ---


@pytest.mark.parametrize("rule", Rule)
def test_greedy_verification_compares_ids_under_either_rule(rule):
    logits = np.array([[0, 3, 1, 2], [5, 0, 0, 0], [0, 0, 9, 0]], dtype=np.float32)
    greedy = SamplingParams()
    sent = (SparseDistribution((1, 2), (1.0, 1.0)), SparseDistribution((2, 3), (0.5, 1.0)))
    assert rules.verify_draft((1, 0), (), logits.__getitem__, Request(greedy, rule), 4).token_ids == (1, 0, 2)
    verdict = rules.verify_draft(
        (1, 3), sent if rule is Rule.REJECTION else (), logits.__getitem__, Request(greedy, rule), 4
    )
    assert (verdict.token_ids, verdict.accepted) == ((1, 0), 1)
    assert rules.draft_token(logits[0], Request(greedy, rule), 9) == (1, None)


def test_nothing_drafted_is_plain_decoding_under_either_rule():
    logits = np.random.default_rng(2).normal(size=50).astype(np.float32)
    for position in range(50):
        both = [
            rules.verify_draft((), (), lambda i: logits, Request(PLAIN, rule, margins=True), position) for rule in Rule
        ]
        assert both[0] == both[1]
        assert both[0].token_ids == (draw(logits, PLAIN, position),)


# --- the types ---


def test_a_draft_has_a_distribution_for_each_token_or_for_none():
    one = SparseDistribution((1, 2), (1.0, 0.5))
    assert Draft((1, 2), distributions=(one, one)).distributions == (one, one)
    with pytest.raises(ValueError, match="1 for 2 tokens"):
        Draft((1, 2), distributions=(one,))


def test_a_weight_that_no_32_bit_float_holds_is_refused():
    with pytest.raises(InvalidField, match="32-bit"):
        SparseDistribution((1, 2), (1.0, 0.1))

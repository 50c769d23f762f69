"""Plants known mistakes of the rejection rule, one per copy, and checks that the tests of its law catch each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest

from tandem.speculation import rejection
from tests.speculation import rejection_laws as laws
from tests.speculation.laws import mutated


@dataclass(frozen=True)
class Mutant:
    name: str
    changes: tuple[tuple[str, str], ...]
    caught_by: tuple[Callable[[ModuleType], None], ...]

    def planted(self) -> ModuleType:
        (old, new), *more = self.changes
        return mutated(rejection, old, new, *more)


TOKEN, SEQUENCES = laws.check_law_of_one_position, laws.check_law_of_sequences
ONE, SEEDED = laws.check_seeded_law_of_one_position, laws.check_seeded_law
REPEAT, APART = laws.check_rounds_repeat, laws.check_decisions_are_independent

CORRECTION = "return Verdict((*draft[:i], chance.correct(i, residual(p, q))), accepted=i)"
BONUS = "bonus(len(draft))"
P = "Distribution(*probabilities(logits, params))"
DRAWN = "return exactly(sent).at(uniform(params.seed, position, Purpose.DRAFT)), sent"
ACCEPT = "uniform(self.seed, self.start + i, Purpose.ACCEPT)"
RESIDUAL = "uniform(self.seed, self.start + i, Purpose.RESIDUAL)"


def p_with(changed: str) -> str:
    """The verifier's p, warped by other parameters than the request's."""
    return f"Distribution(*probabilities(logits, __import__('dataclasses').replace(params, {changed})))"


def gumbel(distribution: str, seed: str, position: str) -> str:
    """A draw from a distribution by the noise that agreement draws with."""
    draws = "__import__('tandem.speculation.draws', fromlist=['draws'])"
    noise = f"{draws}.gumbel({draws}.words({seed}, {position}, 16))[({distribution}).ids]"
    return f"int(({distribution}).ids[np.argmax(np.log(({distribution}).p) + {noise})])"


MUTANTS = [
    # The residual
    Mutant(
        "the correction is drawn from p",
        (("chance.correct(i, residual(p, q))", "chance.correct(i, p)"),),
        (TOKEN, SEQUENCES),
    ),
    Mutant(
        "the residual forgets to subtract",
        (("np.maximum(0.0, p.p[at[shared]] - q.p[shared])", "p.p[at[shared]] * (q.p[shared] < p.p[at[shared]])"),),
        (TOKEN, SEQUENCES),
    ),
    Mutant(
        "the residual is that of |p - q|",
        (("np.maximum(0.0, p.p[at[shared]] - q.p[shared])", "np.abs(p.p[at[shared]] - q.p[shared])"),),
        (TOKEN, SEQUENCES),
    ),
    # What is sent
    Mutant(
        "q is sampled in full but only its top is sent",
        ((DRAWN, DRAWN.replace("exactly(sent)", "warped(logits[:target_vocab_size], params)")),),
        (SEEDED,),
    ),
    Mutant("weights are not normalised", (("weights / math.fsum(sent.weights)", "weights"),), (TOKEN, SEQUENCES)),
    Mutant(
        "tokens that the target does not have are drawn",
        (("logits[:target_vocab_size]", "logits"),),
        (laws.check_only_tokens_of_the_target_are_proposed,),
    ),
    # The verifier's p
    Mutant("temperature is dropped from p", ((P, p_with("temperature=1.0")),), (TOKEN, SEQUENCES)),
    Mutant("top-p is dropped from p", ((P, p_with("top_p=1.0")),), (TOKEN, SEQUENCES)),
    Mutant("top-k is dropped from p", ((P, p_with("top_k=0")),), (TOKEN, SEQUENCES)),
    Mutant("min-p is dropped from p", ((P, p_with("min_p=0.0")),), (TOKEN,)),
    # AcceptanceRates
    Mutant("a token is accepted above the ratio", ((f"{ACCEPT} <", f"{ACCEPT} >"),), (ONE, SEEDED)),
    Mutant(
        "the ratio is upside down",
        (("return min(1.0, p / q)", "return min(1.0, q / max(p, 1e-300))"),),
        (TOKEN, SEQUENCES),
    ),
    Mutant("the rejected token is committed", (("chance.correct(i, residual(p, q))", "token"),), (TOKEN, SEQUENCES)),
    Mutant(
        "the round goes on past the first rejection",
        ((CORRECTION, "draft = (*draft[:i], chance.correct(i, residual(p, q)), *draft[i + 1 :])"),),
        (SEQUENCES,),
    ),
    Mutant("p is that of the row before", (("p = target(i)", "p = target(max(0, i - 1))"),), (SEQUENCES,)),
    # The bonus
    Mutant(
        "the bonus comes from the residual",
        ((BONUS, "(chance.correct(i, residual(p, q)) if draft else bonus(0))"),),
        (SEQUENCES,),
    ),
    Mutant("the bonus comes from the row before", ((BONUS, "bonus(max(0, len(draft) - 1))"),), (SEQUENCES,)),
    Mutant("the bonus comes from a padded row", ((BONUS, "bonus(len(draft) + 1)"),), (SEQUENCES,)),
    # Randomness
    Mutant("acceptance is rolled anew on a retry", ((ACCEPT, "np.random.random()"),), (REPEAT,)),
    Mutant("the correction is rolled anew on a retry", ((RESIDUAL, "np.random.random()"),), (REPEAT,)),
    Mutant(
        "the draft is rolled anew on a retry",
        (("uniform(params.seed, position, Purpose.DRAFT)", "np.random.random()"),),
        (REPEAT,),
    ),
    Mutant("draft and acceptance share a stream", ((ACCEPT, ACCEPT.replace("ACCEPT", "DRAFT")),), (ONE, APART)),
    Mutant("draft and correction share a stream", ((RESIDUAL, RESIDUAL.replace("RESIDUAL", "DRAFT")),), (ONE, APART)),
    Mutant(
        "acceptance and correction share a stream", ((RESIDUAL, RESIDUAL.replace("RESIDUAL", "ACCEPT")),), (ONE, APART)
    ),
    Mutant(
        "the draft takes its number from agreement's noise",
        (("Purpose.DRAFT)), sent", "Purpose.TOKEN)), sent"),),
        (APART,),
    ),
    Mutant(
        "a draft that is coupled by agreement's noise is corrected with the same noise",
        (
            (DRAWN, f"return {gumbel('exactly(sent)', 'params.seed', 'position')}, sent"),
            (f"return distribution.at({RESIDUAL})", f"return {gumbel('distribution', 'self.seed', 'self.start + i')}"),
        ),
        (ONE, APART),
    ),
    Mutant("all positions of a round share a number", ((ACCEPT, ACCEPT.replace(" + i", "")),), (SEEDED, APART)),
]

CASES = [pytest.param(m, check, id=f"{m.name}: {check.__name__}") for m in MUTANTS for check in m.caught_by]


@pytest.mark.thorough
@pytest.mark.parametrize(("mutant", "check"), CASES)
def test_the_planted_trap_is_caught(mutant, check):
    planted = mutant.planted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mutant may divide by zero on its way to being caught
        with pytest.raises(AssertionError):
            check(planted)


CHECKS = list(dict.fromkeys(check for mutant in MUTANTS for check in mutant.caught_by))


@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_check_passes_on_a_copy_without_a_trap(check):
    check(mutated(rejection, P, P))

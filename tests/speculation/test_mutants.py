"""Plants known mistakes of draws and of the rejection rule, one per copy of a module: their laws catch each of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from tandem.speculation import rejection
from tests.speculation import laws, rejection_laws
from tests.speculation.laws import OURS, Implementation, PlaceGone, mutated


@dataclass(frozen=True)
class Mutant:
    """Text of draws.py that reads otherwise; without one, `new` is by how many positions a drafter's noise is off."""

    name: str
    old: str
    new: str
    caught_by: tuple[Callable[[Implementation], None], ...]

    def planted(self) -> Implementation:
        return (
            Implementation(mutated(OURS.draws, self.old, self.new))
            if self.old
            else Implementation(draft_offset=int(self.new))
        )


@dataclass(frozen=True)
class RuleMutant:
    """Of rejection.py."""

    name: str
    changes: tuple[tuple[str, str], ...]
    caught_by: tuple[Callable[[ModuleType], None], ...]

    def planted(self) -> ModuleType:
        (old, new), *more = self.changes
        return mutated(rejection, old, new, *more)


DRAWS, DRAWN, SETS = laws.check_draw_laws, laws.check_seeded_draws, laws.check_survivors
SAME = laws.check_same_outputs
PERFECT, PRUNING = laws.check_perfect_draft, laws.check_pruning
KEY = "key = np.array([seed, position], dtype=np.uint64)"
UNIFORMS = "-log(-log(uniforms))"
CALLS = "__import__('itertools').count()"

TOKEN, SEQUENCES = rejection_laws.check_law_of_one_position, rejection_laws.check_law_of_sequences
ONE, SEEDED = rejection_laws.check_seeded_law_of_one_position, rejection_laws.check_seeded_law
REPEAT, APART = rejection_laws.check_rounds_repeat, rejection_laws.check_decisions_are_independent

CORRECTION = "return Verdict((*draft[:i], chance.correct(i, residual(p, q))), accepted=i)"
BONUS = "bonus(len(draft))"
P = "Distribution(*probabilities(logits, params))"
GUESS = "return exactly(sent).at(uniform(params.seed, position, Purpose.DRAFT)), sent"
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


MUTANTS: list[Any] = [
    # Warping
    Mutant("temperature is dropped", " / params.temperature", "", (DRAWS, DRAWN, SAME)),
    Mutant("top-k is dropped", "if 0 < params.top_k < len(scores):", "if False:", (DRAWS, SETS, DRAWN)),
    Mutant("top-p is dropped", "if params.top_p < 1:", "if False:", (DRAWS, SETS, DRAWN)),
    Mutant("min-p is dropped", "if params.min_p > 0:", "if False:", (DRAWS, SETS, DRAWN)),
    Mutant(
        "top-p forgets that top-k came first",
        "whole = total(exp(pool - top))",
        "whole = total(exp(scores - top))",
        (SETS,),
    ),
    Mutant(
        "top-p keeps one token too few", "return head[: enough + 1]", "return head[: max(1, enough)]", (DRAWS, SETS)
    ),
    Mutant(
        "top-k takes the higher id among equals",
        "level = np.flatnonzero(among == threshold)[: k - len(above)]",
        "level = np.flatnonzero(among == threshold)[::-1][: k - len(above)]",
        (SETS,),
    ),
    # Noise
    Mutant(
        "a retry re-rolls",
        "@functools.lru_cache(maxsize=32)",
        f"@(lambda words, calls={CALLS}: lambda seed, *rest: words(seed ^ next(calls), *rest))",
        (SAME,),
    ),
    Mutant(
        "every position has the same noise", KEY, "key = np.array([seed, 0], dtype=np.uint64)", (DRAWS, DRAWN, SAME)
    ),
    Mutant(
        "every seed has the same noise", KEY, "key = np.array([0, position], dtype=np.uint64)", (DRAWS, DRAWN, SAME)
    ),
    Mutant(
        "seed and position are added up", KEY, "key = np.array([seed + position, 0], dtype=np.uint64)", (DRAWN, SAME)
    ),
    Mutant("the noise has the wrong sign", UNIFORMS, "log(-log(uniforms))", (DRAWS, DRAWN)),
    Mutant(
        "uniforms have 32 bits",
        "uniforms = (",
        "raw = (raw >> np.uint64(32)) << np.uint64(32)\n    uniforms = (",
        (laws.check_noise_resolution,),
    ),
    Mutant(
        "candidates share the noise of the first ids",
        "gumbel(raw[candidates])",
        "gumbel(raw[: len(candidates)])",
        (PRUNING, DRAWN),
    ),
    Mutant(
        "the vocabulary is pruned without regard to noise",
        "return np.union1d(head, rest)",
        "return np.sort(head)",
        (PRUNING,),
    ),
    Mutant(
        "the pruning keeps the winner but loses the runner-up",
        "bound = np.partition(scores[head] + gumbel(raw[head]), -2)[-2]",
        "bound = np.partition(scores[head] + gumbel(raw[head]), -1)[-1]",
        (PRUNING,),
    ),
    Mutant("the draft's noise is one position behind", "", "-1", (laws.check_acceptances, PERFECT)),
    Mutant("the draft's noise is one position ahead", "", "1", (laws.check_acceptances, PERFECT)),
    # The residual
    RuleMutant(
        "the correction is drawn from p",
        (("chance.correct(i, residual(p, q))", "chance.correct(i, p)"),),
        (TOKEN, SEQUENCES),
    ),
    RuleMutant(
        "the residual forgets to subtract",
        (("np.maximum(0.0, p.p[at[shared]] - q.p[shared])", "p.p[at[shared]] * (q.p[shared] < p.p[at[shared]])"),),
        (TOKEN, SEQUENCES),
    ),
    RuleMutant(
        "the residual is that of |p - q|",
        (("np.maximum(0.0, p.p[at[shared]] - q.p[shared])", "np.abs(p.p[at[shared]] - q.p[shared])"),),
        (TOKEN, SEQUENCES),
    ),
    # What is sent
    RuleMutant(
        "q is sampled in full but only its top is sent",
        ((GUESS, GUESS.replace("exactly(sent)", "warped(logits[:target_vocab_size], params)")),),
        (SEEDED,),
    ),
    RuleMutant("weights are not normalised", (("weights / math.fsum(sent.weights)", "weights"),), (TOKEN, SEQUENCES)),
    RuleMutant(
        "tokens that the target does not have are drawn",
        (("logits[:target_vocab_size]", "logits"),),
        (rejection_laws.check_only_tokens_of_the_target_are_proposed,),
    ),
    # The verifier's p
    RuleMutant("temperature is dropped from p", ((P, p_with("temperature=1.0")),), (TOKEN, SEQUENCES)),
    RuleMutant("top-p is dropped from p", ((P, p_with("top_p=1.0")),), (TOKEN, SEQUENCES)),
    RuleMutant("top-k is dropped from p", ((P, p_with("top_k=0")),), (TOKEN, SEQUENCES)),
    RuleMutant("min-p is dropped from p", ((P, p_with("min_p=0.0")),), (TOKEN,)),
    # AcceptanceRates
    RuleMutant("a token is accepted above the ratio", ((f"{ACCEPT} <", f"{ACCEPT} >"),), (ONE, SEEDED)),
    RuleMutant(
        "the ratio is upside down",
        (("return min(1.0, p / q)", "return min(1.0, q / max(p, 1e-300))"),),
        (TOKEN, SEQUENCES),
    ),
    RuleMutant(
        "the rejected token is committed", (("chance.correct(i, residual(p, q))", "token"),), (TOKEN, SEQUENCES)
    ),
    RuleMutant(
        "the round goes on past the first rejection",
        ((CORRECTION, "draft = (*draft[:i], chance.correct(i, residual(p, q)), *draft[i + 1 :])"),),
        (SEQUENCES,),
    ),
    RuleMutant("p is that of the row before", (("p = target(i)", "p = target(max(0, i - 1))"),), (SEQUENCES,)),
    # The bonus
    RuleMutant(
        "the bonus comes from the residual",
        ((BONUS, "(chance.correct(i, residual(p, q)) if draft else bonus(0))"),),
        (SEQUENCES,),
    ),
    RuleMutant("the bonus comes from the row before", ((BONUS, "bonus(max(0, len(draft) - 1))"),), (SEQUENCES,)),
    RuleMutant("the bonus comes from a padded row", ((BONUS, "bonus(len(draft) + 1)"),), (SEQUENCES,)),
    # Randomness
    RuleMutant("acceptance is rolled anew on a retry", ((ACCEPT, "np.random.random()"),), (REPEAT,)),
    RuleMutant("the correction is rolled anew on a retry", ((RESIDUAL, "np.random.random()"),), (REPEAT,)),
    RuleMutant(
        "the draft is rolled anew on a retry",
        (("uniform(params.seed, position, Purpose.DRAFT)", "np.random.random()"),),
        (REPEAT,),
    ),
    RuleMutant("draft and acceptance share a stream", ((ACCEPT, ACCEPT.replace("ACCEPT", "DRAFT")),), (ONE, APART)),
    RuleMutant(
        "draft and correction share a stream", ((RESIDUAL, RESIDUAL.replace("RESIDUAL", "DRAFT")),), (ONE, APART)
    ),
    RuleMutant(
        "acceptance and correction share a stream", ((RESIDUAL, RESIDUAL.replace("RESIDUAL", "ACCEPT")),), (ONE, APART)
    ),
    RuleMutant(
        "the draft takes its number from agreement's noise",
        (("Purpose.DRAFT)), sent", "Purpose.TOKEN)), sent"),),
        (APART,),
    ),
    RuleMutant(
        "a draft that is coupled by agreement's noise is corrected with the same noise",
        (
            (GUESS, f"return {gumbel('exactly(sent)', 'params.seed', 'position')}, sent"),
            (f"return distribution.at({RESIDUAL})", f"return {gumbel('distribution', 'self.seed', 'self.start + i')}"),
        ),
        (ONE, APART),
    ),
    RuleMutant("all positions of a round share a number", ((ACCEPT, ACCEPT.replace(" + i", "")),), (SEEDED, APART)),
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


def test_a_copy_without_a_trap_keeps_the_laws_as_its_original_does():
    """The other laws are checked on the original alone: test_draws.py, test_law.py, test_rejection.py."""
    for check in (DRAWN, SETS):
        check(Implementation(mutated(OURS.draws, KEY, KEY)))
    SEQUENCES(mutated(rejection, P, P))


def test_a_mutant_whose_place_is_gone_says_so():
    with pytest.raises(PlaceGone, match="adapt the mutant"):
        mutated(OURS.draws, "no such text", "")

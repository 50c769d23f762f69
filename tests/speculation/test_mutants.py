"""Plants known implementation mistakes, one per copy of a module, and checks that the tests catch each of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.speculation import laws
from tests.speculation.laws import OURS, Implementation, PlaceGone, mutated


@dataclass(frozen=True)
class Mutant:
    name: str
    old: str  # of draws.py; "" for the drafter's position
    new: str
    caught_by: tuple[Callable[[Implementation], None], ...]

    def planted(self) -> Implementation:
        if not self.old:
            return Implementation(draft_offset=int(self.new))
        return Implementation(mutated(OURS.draws, self.old, self.new))


DRAWS, SEEDED, SETS = laws.check_draw_laws, laws.check_seeded_draws, laws.check_survivors
SAME = laws.check_same_outputs
PERFECT, PRUNING = laws.check_perfect_draft, laws.check_pruning
KEY = "key = np.array([seed, position], dtype=np.uint64)"
UNIFORMS = "-log(-log(uniforms))"
CALLS = "__import__('itertools').count()"

MUTANTS = [
    # Warping
    Mutant("temperature is dropped", " / params.temperature", "", (DRAWS, SEEDED, SAME)),
    Mutant("top-k is dropped", "if 0 < params.top_k < len(scores):", "if False:", (DRAWS, SETS, SEEDED)),
    Mutant("top-p is dropped", "if params.top_p < 1:", "if False:", (DRAWS, SETS, SEEDED)),
    Mutant("min-p is dropped", "if params.min_p > 0:", "if False:", (DRAWS, SETS, SEEDED)),
    Mutant(
        "top-p forgets that top-k came first",
        "whole = total(exp(pool - top))",
        "whole = total(exp(scores - top))",
        (SETS,),
    ),
    Mutant(
        "top-p keeps one token too few",
        "return head[: enough + 1]",
        "return head[: max(1, enough)]",
        (DRAWS, SETS),
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
        (laws.check_draws_repeat, SAME),
    ),
    Mutant(
        "every position has the same noise",
        KEY,
        "key = np.array([seed, 0], dtype=np.uint64)",
        (DRAWS, SEEDED, SAME),
    ),
    Mutant(
        "every seed has the same noise",
        KEY,
        "key = np.array([0, position], dtype=np.uint64)",
        (DRAWS, SEEDED, SAME),
    ),
    Mutant(
        "seed and position are added up",
        KEY,
        "key = np.array([seed + position, 0], dtype=np.uint64)",
        (SEEDED, SAME),
    ),
    Mutant("the noise has the wrong sign", UNIFORMS, "log(-log(uniforms))", (DRAWS, SEEDED)),
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
        (PRUNING, SEEDED),
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
]


CASES = [pytest.param(m, check, id=f"{m.name}: {check.__name__}") for m in MUTANTS for check in m.caught_by]


@pytest.mark.thorough
@pytest.mark.parametrize(("mutant", "check"), CASES)
def test_the_planted_trap_is_caught(mutant, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mutant may divide by zero on its way to being caught
        planted = mutant.planted()
        with pytest.raises(AssertionError):
            check(planted)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "check", list(dict.fromkeys(c for m in MUTANTS for c in m.caught_by)), ids=lambda c: c.__name__
)
def test_the_check_passes_without_a_trap(check):
    check(OURS)


def test_a_copy_without_a_trap_passes_too():
    check = laws.check_same_outputs
    check(Implementation(mutated(OURS.draws, KEY, KEY)))


def test_a_mutant_whose_place_is_gone_says_so():
    with pytest.raises(PlaceGone, match="adapt the mutant"):
        mutated(OURS.draws, "no such text", "")

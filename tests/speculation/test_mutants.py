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
    module: str  # of Implementation; "" for the drafter's position
    old: str
    new: str
    caught_by: tuple[Callable[[Implementation], None], ...]

    def planted(self) -> Implementation:
        parts = {name: getattr(OURS, name) for name in ("acceptance", "draws")}
        if not self.module:
            return Implementation(**parts, draft_offset=int(self.new))
        return Implementation(**{**parts, self.module: mutated(parts[self.module], self.old, self.new)})


LAW, SAME = laws.check_enumerated_laws, laws.check_same_outputs
DRAWS, SEEDED, SETS = laws.check_draw_laws, laws.check_seeded_draws, laws.check_survivors
PERFECT, PRUNING = laws.check_perfect_draft, laws.check_pruning
RULE, DRAW = "acceptance", "draws"
COMMITTED = "token_ids=tuple(drawn),"
DRAWN = "drawn.append(target_draw(i))"
MISMATCH = "if i == len(draft) or drawn[i] != draft[i]:\n            break"
KEY = "key = np.array([seed, position], dtype=np.uint64)"
UNIFORMS = "-log(-log(uniforms))"
CALLS = "__import__('itertools').count()"

MUTANTS = [
    # The rule
    Mutant(
        "the draft token is committed at the mismatch",
        RULE,
        COMMITTED,
        "token_ids=tuple(draft[i] if i < len(draft) else d for i, d in enumerate(drawn)),",
        (LAW, SAME),
    ),
    Mutant(
        "the round stops before the correction",
        RULE,
        COMMITTED,
        "token_ids=tuple(d for i, d in enumerate(drawn) if i == len(draft) or d == draft[i]),",
        (LAW, laws.check_wrong_draft),
    ),
    Mutant(
        "the round goes on past the first mismatch",
        RULE,
        "if i == len(draft) or drawn[i] != draft[i]:",
        "if i == len(draft):",
        (LAW, SAME),
    ),
    Mutant(
        "the correction is resampled with fresh noise",
        RULE,
        MISMATCH,
        MISMATCH.replace(
            "break", "drawn[i] = drawn[i] if i == len(draft) else target_draw(i, True)\n            break"
        ),
        (LAW,),
    ),
    Mutant(
        "the bonus comes from a padded row",
        RULE,
        DRAWN,
        "drawn.append(target_draw(i + (i == len(draft))))",
        (LAW, SAME),
    ),
    Mutant(
        "the bonus comes from the row before",
        RULE,
        DRAWN,
        "drawn.append(target_draw(max(0, i - (i == len(draft)))))",
        (LAW, SAME),
    ),
    Mutant("every row is one too far", RULE, DRAWN, "drawn.append(target_draw(i + 1))", (LAW, SAME)),
    Mutant(
        "there is no bonus after full acceptance",
        RULE,
        COMMITTED,
        "token_ids=tuple(drawn)[: max(1, len(draft))],",
        (PERFECT,),
    ),
    Mutant(
        "the bonus counts as accepted",
        RULE,
        "accepted=len(drawn) - 1",
        "accepted=len(drawn)",
        (PERFECT, laws.check_wrong_draft),
    ),
    # Warping
    Mutant("temperature is dropped", DRAW, " / params.temperature", "", (DRAWS, SEEDED, SAME)),
    Mutant("top-k is dropped", DRAW, "if 0 < params.top_k < len(scores):", "if False:", (DRAWS, SETS, SEEDED)),
    Mutant("top-p is dropped", DRAW, "if params.top_p < 1:", "if False:", (DRAWS, SETS, SEEDED)),
    Mutant("min-p is dropped", DRAW, "if params.min_p > 0:", "if False:", (DRAWS, SETS, SEEDED)),
    Mutant(
        "top-p forgets that top-k came first",
        DRAW,
        "whole = total(exp(pool - top))",
        "whole = total(exp(scores - top))",
        (SETS,),
    ),
    Mutant(
        "top-p keeps one token too few",
        DRAW,
        "return head[: enough + 1]",
        "return head[: max(1, enough)]",
        (DRAWS, SETS),
    ),
    Mutant(
        "top-k takes the higher id among equals",
        DRAW,
        "level = np.flatnonzero(among == threshold)[: k - len(above)]",
        "level = np.flatnonzero(among == threshold)[::-1][: k - len(above)]",
        (SETS,),
    ),
    # Noise
    Mutant(
        "a retry re-rolls",
        DRAW,
        "@functools.lru_cache(maxsize=32)",
        f"@(lambda words, calls={CALLS}: lambda seed, *rest: words(seed ^ next(calls), *rest))",
        (laws.check_draws_repeat, SAME),
    ),
    Mutant(
        "every position has the same noise",
        DRAW,
        KEY,
        "key = np.array([seed, 0], dtype=np.uint64)",
        (DRAWS, SEEDED, SAME),
    ),
    Mutant(
        "every seed has the same noise",
        DRAW,
        KEY,
        "key = np.array([0, position], dtype=np.uint64)",
        (DRAWS, SEEDED, SAME),
    ),
    Mutant(
        "seed and position are added up",
        DRAW,
        KEY,
        "key = np.array([seed + position, 0], dtype=np.uint64)",
        (SEEDED, SAME),
    ),
    Mutant("the noise has the wrong sign", DRAW, UNIFORMS, "log(-log(uniforms))", (DRAWS, SEEDED)),
    Mutant(
        "uniforms have 32 bits",
        DRAW,
        "uniforms = (",
        "raw = (raw >> np.uint64(32)) << np.uint64(32)\n    uniforms = (",
        (laws.check_noise_resolution,),
    ),
    Mutant(
        "candidates share the noise of the first ids",
        DRAW,
        "gumbel(raw[candidates])",
        "gumbel(raw[: len(candidates)])",
        (PRUNING, SEEDED),
    ),
    Mutant(
        "the vocabulary is pruned without regard to noise",
        DRAW,
        "return np.union1d(head, rest)",
        "return np.sort(head)",
        (PRUNING,),
    ),
    Mutant(
        "the pruning keeps the winner but loses the runner-up",
        DRAW,
        "bound = np.partition(scores[head] + gumbel(raw[head]), -2)[-2]",
        "bound = np.partition(scores[head] + gumbel(raw[head]), -1)[-1]",
        (PRUNING,),
    ),
    Mutant("the draft's noise is one position behind", "", "", "-1", (laws.check_acceptances, PERFECT)),
    Mutant("the draft's noise is one position ahead", "", "", "1", (laws.check_acceptances, PERFECT)),
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
    copies = {"acceptance": mutated(OURS.acceptance, COMMITTED, COMMITTED), "draws": mutated(OURS.draws, KEY, KEY)}
    check(Implementation(**copies))


def test_a_mutant_whose_place_is_gone_says_so():
    with pytest.raises(PlaceGone, match="adapt the mutant"):
        mutated(OURS.draws, "no such text", "")

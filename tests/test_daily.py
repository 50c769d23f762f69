"""Which combinations of parameters CI runs."""

from __future__ import annotations

from itertools import product

from tests.daily import covering


def test_a_few_combinations_hold_each_value() -> None:
    combinations = [{("a", a), ("b", b), ("c", c)} for a, b, c in product(range(5), range(3), range(2))]
    kept = covering(combinations)
    assert len(kept) == 5
    assert set().union(*(combinations[place] for place in kept)) == set().union(*combinations)
    assert covering([]) == set() and covering([{("a", 1)}] * 3) == {0}

"""The table of what excludes what: it is whole, it wins over what a runner has, and errors say its reasons."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tandem.engine.compatibility import ASKED, EXCLUDED, able
from tandem.runners.capabilities import Capabilities, No, Trait
from tests.support import toy
from tests.toy import ToyRunner


class Such(ToyRunner):
    traits: frozenset[Trait] = frozenset()

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, traits=self.traits)


RUNNER = Such(toy().limits)


def of(*traits: Trait) -> Capabilities:
    RUNNER.traits = frozenset(traits)
    return able(RUNNER)


def test_every_way_to_run_a_model_has_its_row_and_every_reason_a_field_that_users_ask_for() -> None:
    known = {field.name for field in fields(Capabilities)}
    assert set(EXCLUDED) == set(Trait) and set(ASKED) <= known
    assert {field for reasons in EXCLUDED.values() for field in reasons} == set(ASKED)


@pytest.mark.parametrize("trait", Trait)
def test_what_is_excluded_is_refused_with_its_reason_and_the_rest_stays(trait: Trait) -> None:
    plain, found = of(), of(trait)
    for field in ASKED:
        why = EXCLUDED[trait].get(field)
        assert getattr(found, field) == (getattr(plain, field) if why is None else why)
        assert isinstance(getattr(found, field), No) == (why is not None)

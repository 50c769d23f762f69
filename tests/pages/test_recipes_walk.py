"""The commands of recipes run with stand-ins: in a file of their own, beside those of the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daily import daily
from tests.pages import walk
from tests.pages.commands import RECIPES
from tests.pages.recipe import Recipe
from tests.pages.test_walk import NEEDS_CURL


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@NEEDS_CURL
# The last has the commands of the one before it, with other sizes.
@pytest.mark.parametrize("page", daily(RECIPES, 0, 1, 2), ids=lambda page: page.stem)
def test_a_recipe_can_be_walked(page: Path, tmp_path: Path) -> None:
    steps = list(walk.walk(page, Recipe(page, tmp_path)))
    assert [(step.command.line, step.how) for step in steps if step.verdict not in ("ran", "checked")] == []
    assert sum(step.verdict == "ran" for step in steps) >= 10

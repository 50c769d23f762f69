"""Mistakes in translation that the tests beside this one must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.planting import planted
from tests.vocabularies import test_mapping

MAPPING = "tandem.vocabularies.mapping"
GROWS = test_mapping.test_a_prefix_that_grows_and_is_taken_back_has_the_tokens_of_its_whole_text
LEAVES = test_mapping.test_a_prefix_that_leaves_its_path_follows_the_new_one
DRAFT = test_mapping.test_a_draft_is_the_same_bytes_up_to_the_first_token_that_the_target_does_not_have
MISTAKES = {
    "a draft goes on behind a token that is not shared": ("Translation.drafted", "break", "continue", DRAFT),
    "marks outlive the tokens before them": ("Prefix.follow", "self._marks[-1][0] > same", "False", LEAVES),
    "a mark is set inside a word": ("Prefix._begins_word", "return left[-1:] ==", "return True or left[-1:] ==", GROWS),
    "what was begun of a character is drafted for": ("Prefix.follow", "return None", "pass", GROWS),
    "special tokens are pieces of text": (
        "translation",
        "(key := (text, token in draft.special)) in mine",
        "(key := (text, (text, True) in mine)) in mine",
        test_mapping.test_special_tokens_are_special_on_both_sides_and_the_ends_are_one,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(name: str) -> None:
    where, old, new, check = MISTAKES[name]
    caught: Callable[[], object] = check
    with planted(name, f"{MAPPING}:{where}", old, new), pytest.raises(AssertionError):
        caught()

"""The page about adding an option is true of the two that were added: the files that it names mention them."""

from __future__ import annotations

import re

import pytest

from tests.support import REPOSITORY

PAGE = (REPOSITORY / "docs" / "adding-an-option.md").read_text(encoding="utf-8")
FILE = re.compile(r"`((?:proto|tandem|services|clients|tests)/[\w./-]+\.(?:py|proto))`")
REQUEST, ANSWER = PAGE.split("## An option of the answer")
CHANGED = FILE.findall("".join(line for line in REQUEST.splitlines(True) if line.startswith("|")))
TESTS = FILE.findall(REQUEST.partition("## Its tests")[2])


@pytest.mark.parametrize("name", [*CHANGED, *TESTS])
def test_a_file_that_the_option_of_a_request_touched_mentions_it(name: str) -> None:
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert re.search(r"\bdrafts\b", text)


@pytest.mark.parametrize("name", FILE.findall(ANSWER))
def test_a_file_that_the_option_of_the_answer_touched_mentions_it(name: str) -> None:
    assert "acceptance_histogram" in (REPOSITORY / name).read_text(encoding="utf-8")


def test_each_option_touches_at_most_six_files_of_the_product() -> None:
    answer = [name for name in FILE.findall(ANSWER) if not name.startswith("tests/")]
    assert 0 < len(answer) <= 6 and len(set(CHANGED)) == len(CHANGED) == 6
    assert len(set(TESTS)) >= 5

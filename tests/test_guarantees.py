"""Each of G1 to G12 (docs/sessions.md) is cited by a test that proves it, and the page lists all of them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CITED = re.compile(r"\bG(\d+)\b(?: to G(\d+)\b)?")


def numbers(text: str) -> set[int]:
    """Returns the guarantees that a text names; "G2 to G5" names four."""
    found: set[int] = set()
    for first, last in CITED.findall(text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


@functools.cache
def citations() -> dict[int, list[str]]:
    """Tests by the guarantee that their name or docstring cites; docstrings of modules do not count."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if CITED.search(text) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for number in numbers(f"{node.name} {ast.get_docstring(node) or ''}"):
                    found.setdefault(number, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def test_every_guarantee_is_cited_by_a_test() -> None:
    assert set(range(1, 13)) - set(citations()) == set(), "no test cites these in its name or docstring"


def test_no_test_cites_a_guarantee_that_was_never_given() -> None:
    assert set(citations()) <= set(range(1, 13))


def test_the_page_on_sessions_says_what_each_guarantee_is() -> None:
    rows = re.findall(r"^\| G(\d+) \|", (ROOT / "docs" / "sessions.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 13))

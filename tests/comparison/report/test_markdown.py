"""report.md: the same content, in tables that GitHub can show."""

from __future__ import annotations

import re

import pytest

from tandem.comparison.report.markdown import escaped, markdown
from tandem.comparison.report.sections import report_of
from tests.comparison.report.example_comparison import example, minimal


def tables(text: str) -> list[list[str]]:
    groups = re.split(r"\n(?!\|)", text)
    return [[line for line in group.splitlines() if line.startswith("|")] for group in groups if "\n|" in f"\n{group}"]


@pytest.mark.parametrize("make", [example, minimal])
def test_tables_are_rectangular(make):
    found = [table for table in tables(markdown(report_of(make()), {})) if table]
    assert len(found) >= 5
    for table in found:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
        assert len(widths) == 1, table[0]
        assert re.fullmatch(r"\| (-+:?( \| )?)+ \|", table[1])


def test_the_decision_the_figures_and_the_pictures_are_there():
    found = example()
    text = markdown(report_of(found), {"tpot-by-rtt": "plots/tpot-by-rtt.png"})
    assert escaped(found["decision"]["headline"]) in text
    assert "## Decision" in text.splitlines()
    assert "](plots/tpot-by-rtt.png)" in text
    assert "emulated" in text and "DEADLINE" in text
    assert not re.search(r"\b(None|nan)\b", text)


def test_text_of_others_is_neither_markdown_nor_html():
    assert escaped("a|b *c* <script> [x](y)\n# z & `q`") == (r"a\|b \*c\* &lt;script\> \[x\](y) \# z &amp; \`q\`")
    found = example()
    found["settings"]["prompts"][0]["text"] = "```\n<script>alert(1)</script>\n````"
    assert "`````text\n```\n<script>" in markdown(report_of(found), {})

"""The figures of benchmarks.links in docs/links.md, and the picture of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import links_page
from benchmarks.links_page import PAGE, PICTURE, Row, figures, publish, text

ROWS = [Row("20 ms", 26.1, 0.72, 0.75, 0.65, 0.021, 0.0), Row("20 ms, recorded X", 26.0, 0.7, None, 0.68, None, 0.013)]
POINTS = {
    "20 ms": {"lookup": 0.72, "rounds that wait": 0.75, "never waiting": 0.65},
    "20 ms, recorded X": {"lookup": 0.7, "never waiting": 0.68},
}


def test_the_page_gets_the_figures_and_the_picture_holds_those_of_the_page(tmp_path: Path) -> None:
    page, picture = tmp_path / "links.md", tmp_path / "links.png"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    for _ in range(2):
        publish("Measured (today):", ROWS, ["met: all"], page, picture)
    said = page.read_text(encoding="utf-8")
    assert said.count("| 20 ms | 26.1 | 0.72 | 0.75 | 0.65 | +2 % | 0 % |") == 1
    assert said.count("| 20 ms, recorded X | 26.0 | 0.70 | – | 0.68 | – | 1 % |") == 1
    assert "- met: all" in said and "(links.png)" in said and "run to its end on an idle machine" not in said
    assert said.partition(links_page.MARK.format(links_page.CAPACITY))[2] in PAGE.read_text(encoding="utf-8")
    assert figures(page) == POINTS
    with Image.open(picture) as image:
        assert image.text["Description"] == text(POINTS)  # type: ignore[attr-defined]


def test_a_page_without_marks_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "links.md").write_text("none")
    with pytest.raises(ValueError, match=r"does not have <!-- written by benchmarks\.links --page -->"):
        publish("", ROWS, [], tmp_path / "links.md", tmp_path / "links.png")


def test_the_picture_is_that_of_the_page_and_readme_shows_it() -> None:
    shown = "(docs/links.png)" in (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert bool(figures()) == PICTURE.exists() == shown, "python -m benchmarks.links --only none --page"
    if shown:
        with Image.open(PICTURE) as image:
            assert image.text["Description"] == text(figures())  # type: ignore[attr-defined]

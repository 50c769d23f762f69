"""README's picture shows the figures of docs/performance.md."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from benchmarks import round_trip_picture as picture


def test_the_picture_holds_the_figures_of_the_page() -> None:
    with Image.open(picture.PICTURE) as image:
        assert image.text["Description"] == picture.text(picture.figures()), "python -m benchmarks.round_trip_picture"


def test_figures_are_read_from_the_page() -> None:
    points = picture.figures()
    assert [len(of) for of in points.values()] == [2, 5, 5]
    assert points["distributed, rounds wait"][200] == 10 and points["distributed, never waiting"][50] == 0.89


def test_a_picture_holds_what_was_drawn(tmp_path: Path) -> None:
    points = {"fused": {0: 0.5}, "distributed, rounds wait": {0: 0.7, 9: 2.0}, "distributed, never waiting": {0: 0.9}}
    picture.draw(points, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as image:
        assert image.text["Description"] == picture.text(points) and image.size == (880, 462)

"""The page in a browser: on a phone, in the dark, under the pointer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chromium import Page, browser, opened
from tandem.comparison.report.write import write_report
from tests.comparison.report.example_comparison import example

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(browser() is None, reason="needs chromium (Debian and Ubuntu: apt install chromium)"),
]
PHONE, DESK = (390, 844), (1200, 900)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(example(), tmp_path_factory.mktemp("report"))[0].resolve()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with opened(str(browser())) as found:
        yield found


def right_edges(page: Page, selector: str) -> list[float]:
    return page.run(f"[...document.querySelectorAll('{selector}')].map(e => e.getBoundingClientRect().right)")


def test_a_phone_shows_the_speedups_without_scrolling_sideways(page: Page, report: Path) -> None:
    page.show(report.as_uri(), PHONE)
    assert page.run("document.documentElement.scrollWidth") == PHONE[0]
    heading = "document.querySelector('#architectures ~ .scroll thead th:nth-child(2)').textContent"
    assert page.run(heading).startswith("speedup")
    edges = right_edges(page, "#architectures ~ .scroll:first-of-type tbody td:nth-of-type(1)")
    assert len(edges) >= 4 and max(edges) < PHONE[0]
    tops = ".headline, .figures dd, .strip li, .card dd, .command, .mark, .cautions p"
    assert max(right_edges(page, tops)) <= PHONE[0]


@pytest.mark.parametrize("size", [PHONE, DESK])
def test_the_decision_is_read_without_scrolling(page: Page, report: Path, size: tuple[int, int]) -> None:
    page.show(report.as_uri(), size)
    bottom = page.run("document.querySelector('.headline').getBoundingClientRect().bottom")
    assert bottom < size[1]


def test_dark_pages_have_light_text_on_dark(page: Page, report: Path) -> None:
    brightness = (
        "['color', 'backgroundColor'].map(key => getComputedStyle(document.body)[key].match(/\\d+/g)"
        ".slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3)"
    )
    page.show(report.as_uri(), DESK)
    ink, paper = page.run(brightness)
    assert ink < 60 and paper > 240
    page.show(report.as_uri(), DESK, dark=True)
    ink, paper = page.run(brightness)
    assert ink > 220 and paper < 40


def test_a_value_shows_under_the_pointer_and_nowhere_else(page: Page, report: Path) -> None:
    page.show(report.as_uri(), DESK)
    target = "document.querySelector('#tpot-by-rtt .hover circle')"
    page.run(f"{target}.scrollIntoView({{block: 'center'}})")
    x, y = page.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({target}.getBoundingClientRect())")
    opaque = "filter(text => getComputedStyle(text).opacity === '1').map(text => text.textContent)"
    shown = f"[...document.querySelectorAll('.hover text')].{opaque}"
    assert page.run(shown) == []
    page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    (text,) = page.run(shown)
    assert " ms a token (" in text and text.endswith("), measured")


def test_one_click_selects_a_whole_command(page: Page, report: Path) -> None:
    page.show(report.as_uri(), DESK)
    command = "document.querySelector('.command')"
    page.run(f"{command}.scrollIntoView({{block: 'center'}})")
    x, y = page.run(f"(r => [r.x + 30, r.y + r.height / 2])({command}.getBoundingClientRect())")
    for kind in ("mousePressed", "mouseReleased"):
        page.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert page.run("String(getSelection())").strip() == page.run(f"{command}.textContent").strip()

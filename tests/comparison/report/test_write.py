"""The files of a report, with and without matplotlib; and its picture."""

from __future__ import annotations

import base64
import builtins
import json
import re
import sys

import pytest

from benchmarks import screenshot
from benchmarks.chromium import Page
from tandem.cli.compare import main
from tandem.comparison.report.html import no_plots
from tandem.comparison.report.markdown import escaped
from tandem.comparison.report.write import write_report
from tests.comparison.report.example_comparison import example, minimal
from tests.daily import daily

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def least(tmp_path_factory):
    """The files of the minimal comparison."""
    return write_report(minimal(), tmp_path_factory.mktemp("report") / "out", ("html", "md"))


@pytest.mark.parametrize(("made", "plots"), daily([(minimal, 2), (example, 9)], 0))
def test_both_formats_and_the_plots_are_written_and_nothing_else(tmp_path, least, made, plots):
    written = least if made is minimal else write_report(made(), tmp_path / "out", ("html", "md"))
    folder = written[0].parent
    assert [path.name for path in written[:2]] == ["report.html", "report.md"]
    assert len(written) == 2 + plots and all(path.read_bytes().startswith(PNG) for path in written[2:])
    assert {path for path in folder.rglob("*") if path.is_file()} == set(written)
    linked = re.findall(r"\]\((plots/[^)]+)\)", (folder / "report.md").read_text(encoding="utf-8"))
    assert len(linked) == plots and all((folder / name).is_file() for name in linked)


def test_the_same_comparison_gives_the_same_bytes(tmp_path, least):
    second = write_report(minimal(), tmp_path / "again", ("html", "md"))
    assert [path.read_bytes() for path in least] == [path.read_bytes() for path in second]


def test_a_file_is_rendered_again_beside_itself(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take seconds
    (tmp_path / "comparison.json").write_text(json.dumps(minimal()), encoding="utf-8")
    assert main(["--render", str(tmp_path / "comparison.json")]) == 0
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_what_is_no_comparison_is_refused_in_one_line(tmp_path, capsys, text):
    (tmp_path / "comparison.json").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        main(["--render", str(tmp_path / "comparison.json")])
    refused = capsys.readouterr().err
    assert "error: render: " in refused and refused.count("\n") == 1 and not (tmp_path / "report.html").exists()


def test_an_unknown_format_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="format: 'pdf' is not one of html, md"):
        write_report(minimal(), tmp_path, ("pdf",))


def test_without_matplotlib_the_report_says_what_plots_need(tmp_path, monkeypatch):
    imported = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    written = write_report(example(), tmp_path, ("html", "md"))
    assert [path.name for path in written] == ["report.html", "report.md"]
    assert "Plots need matplotlib (make setup)." in written[0].read_text(encoding="utf-8")
    assert escaped(no_plots()) in written[1].read_text(encoding="utf-8")
    assert "<svg" not in written[0].read_text(encoding="utf-8") and not (tmp_path / "plots").exists()


def test_a_screenshot_needs_a_report_and_a_browser_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert screenshot.main([]) == 2
    assert "run make compare first" in capsys.readouterr().err
    page = tmp_path / "results" / "x" / "report.html"
    page.parent.mkdir(parents=True)
    page.touch()
    monkeypatch.setattr(screenshot, "browser", lambda: None)
    assert screenshot.main([]) == 2
    assert "needs chromium" in capsys.readouterr().err
    assert screenshot.newest_report(tmp_path / "results") == page


class Shown(Page):
    """A page of a browser that notes what it is asked."""

    def __init__(self) -> None:
        self.asked = []

    def ask(self, method, **params):
        self.asked.append((method, params))
        return {"data": base64.b64encode(b"picture").decode(), "result": {"value": True}}


def test_screenshots_are_of_the_page_and_of_nothing_else_wide_dark_and_narrow(tmp_path):
    page = Shown()
    assert set(screenshot.pictures_of_report(page, tmp_path / "r.html")) == {
        "report.png", "report-dark.png", "report-390.png",
    }  # fmt: skip
    loaded = [params["url"] for method, params in page.asked if method == "Page.navigate"]
    assert loaded == [(tmp_path / "r.html").as_uri()] * 3
    sizes = [params["width"] for method, params in page.asked if method == "Emulation.setDeviceMetricsOverride"]
    schemes = [params["features"][0]["value"] for method, params in page.asked if method.endswith("setEmulatedMedia")]
    assert sizes == [1200, 1200, 390] and schemes == ["light", "dark", "light"]

"""report.html: one sound, self-contained page that says what decides."""

from __future__ import annotations

import copy
import re
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tandem.comparison.report import html as html_module
from tandem.comparison.report.figures import FIGURES
from tandem.comparison.report.html import html
from tandem.comparison.report.images import inline_svg
from tandem.comparison.report.sections import report_of
from tests.comparison.report.example_comparison import example, minimal
from tests.comparison.report.test_hover import targets
from tests.daily import daily

VOID = {"meta", "br", "link", "img", "path", "use", "rect", "hr", "input"}
HOSTILE = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Balance, ids, outward references and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.outward: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._attributes(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self._attributes(attrs)

    def _attributes(self, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "action") and not value.startswith("#"):
                self.outward.append(value)

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"{tag} at {self.getpos()}")

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\N{NO-BREAK SPACE}", " ").split())


def pictures_of(comparison) -> dict[str, str]:
    sections = report_of(comparison).sections
    drawn = {b.name for section in sections for b in section.blocks if b.kind == "plot" and b.drawn}
    return {f.name: inline_svg(f.draw(comparison), f.name, f.title) for f in FIGURES if f.name in drawn}


@cache
def pictures() -> dict[str, str]:
    return pictures_of(example())


@cache
def full() -> str:
    return html(report_of(example()), pictures())


@cache
def least() -> str:
    return html(report_of(minimal()), pictures_of(minimal()))


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_plot_tells_its_values(figure) -> None:
    svg = pictures()[figure.name]
    told = targets(svg)
    assert told and all(re.search(r"\d", text) for text in told)
    assert svg.count('class="hover"') == len(told)


@pytest.mark.parametrize("make", [full, least])
def test_the_page_is_balanced_self_contained_and_small(make):
    page = Page(make())
    assert page.wrong == [] and page.open == []
    assert page.outward == [] and "script" not in page.tags
    assert not re.search(r"url\((?!#)|@import", make())
    assert len(page.ids) == len(set(page.ids))
    assert len(make().encode()) < 1_500_000


@pytest.mark.parametrize("make", [full, least])
def test_headings_come_in_order_and_links_within_the_page_lead_somewhere(make):
    page = Page(make())
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert set(re.findall(r'href="#([^"]+)"', make())) <= set(page.ids)
    assert '<html lang="en">' in make() and 'name="viewport"' in make()


def test_the_decision_stands_first_with_its_interval():
    found, text = example(), Page(full()).text
    decision = found["decision"]
    low, high = decision["speedup_interval"]
    assert decision["headline"] in text
    assert f"{decision['speedup']:.2f}×" in text and f"95 % interval {low:.2f} to {high:.2f}" in text
    assert all(sentence in text for sentence in [*decision["because"], *decision["would_change"]])
    assert text.index(decision["headline"]) < text.index("What was measured")


def test_every_architectures_figures_are_there_and_the_link_is_said_to_be_emulated():
    found, text = example(), Page(full()).text
    for name, of in found["conditions"][0]["architectures"].items():
        assert name.replace("_", " ") in text
        for figure in (
            f"{1000 * of['tpot_s']['p50']:.2f}",
            f"{1000 * of['ttft_s']['p50']:.1f}",
            f"{of['output_throughput_token_per_s']:.1f}",
            f"{of['bytes_up_per_token']:.1f}",
        ):
            assert figure in text
    assert text.count("emulated") > 20
    assert all(note in text for note in found["theory"]["notes"])


def test_divergences_and_failures_are_listed():
    text = Page(full()).text
    assert "prose/second, run 0" in text and "0.0625" in text
    assert "DEADLINE_EXCEEDED" in text and "no reply in 300 s" in text


def test_identity_is_one_sentence_where_there_is_nothing_to_list():
    found = example()
    for condition in found["conditions"]:
        for of in condition["architectures"].values():
            if of["identical_to_autoregressive"]:
                of["identical_to_autoregressive"] = {"count": 10, "total": 10, "divergences": []}
    assert "Every output was token-identical to plain decoding" in Page(html(report_of(found), {})).text


def test_what_is_missing_is_explained():
    text = Page(least()).text
    assert "No decision: plain decoding did not run" in text
    assert "No predictions: plain decoding did not run" in text
    assert "Left out: only one sampling setting was measured" in text


def sections_of(page: str) -> dict[str, str]:
    """The sections by title, with everything in them."""
    found = re.findall(r'<section aria-labelledby="[^"]*">\n<h2 [^>]*>(.*?)</h2>(.*?)</section>', page, re.DOTALL)
    return dict(found)


@pytest.mark.parametrize("make", [full, least])
def test_no_section_is_empty_and_the_contents_name_all(make):
    found = sections_of(make())
    assert all(re.search("<(?:table|figure|p|ul|details|pre)", body) for body in found.values())
    listed = re.findall(r'<a href="#[^"]*">(.*?)</a>', make()[make().index("<nav") : make().index("</nav>")])
    assert listed == list(found)


def test_what_was_not_measured_has_no_section_and_is_said_at_the_end():
    titles = list(sections_of(least()))
    assert not {"Under load", "Sampling", "Theory beside measurement", "Earlier runs"} & set(titles)
    last = Page(sections_of(least())[titles[-1]]).text
    for said in (
        "no load was measured (--concurrency, --rate)",
        "one was measured (--rtt-ms 0,20,80)",
        "No predictions",
    ):
        assert said in last


def test_a_narrow_screen_has_names_and_speedups_beside_each_other():
    """A letter is at most 0.65 of the font's size wide in the faces that the page asks for, a digit 0.56."""
    measured = next(section for section in report_of(example()).sections if section.anchor == "architectures")
    table = measured.blocks[0]
    assert table.columns[1].heading.startswith("speedup")
    style = Path(html_module.__file__).with_name("report.css.jinja").read_text(encoding="utf-8")
    (size, padding) = (float(re.search(rf"{rule}", style)[1]) for rule in (
        r"table \{ border-collapse: collapse; font-size: (\S+?)rem", r"th, td \{ padding: \S+ (\S+?)rem"))  # fmt: skip
    wide = sum(max(len(row[i].text) for row in table.rows) * share for i, share in ((0, 0.65), (1, 0.56)))
    assert 16 * (size * wide + 2 * padding) < 390 - 2 * 16, "names and speedups do not fit beside the page's margins"


def test_ratios_are_of_architectures_and_never_of_plain_decoding_over_itself():
    report = report_of(example())
    base = example()["conditions"][0]["architectures"]
    speedups = sorted(
        (base[name]["speedup_vs_autoregressive"] for name in base if name != "autoregressive"), reverse=True
    )
    assert [value for value, _, _ in report.ratios] == [f"{speedup:.2f}×" for speedup in speedups]
    assert report.ratios[0][1] == "fused" and "emulated" in report.measure


def nulled(value):
    """Every figure that may be null is."""
    if isinstance(value, dict):
        return {key: None if key.endswith("_interval") else nulled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nulled(item) for item in value]
    return None if isinstance(value, float) else value


@pytest.mark.parametrize("make", [example, minimal])
def test_nothing_measured_prints_as_a_dash(make):
    found = make()
    found["conditions"] = [
        {
            **condition,
            "architectures": nulled(condition["architectures"]),
            "link": {**nulled(condition["link"]), "rtt_ms": condition["link"]["rtt_ms"]},
        }
        for condition in found["conditions"]
    ]
    found |= {"theory": None, "decision": None, "records": [], "baseline": None}
    text = Page(html(report_of(found), {})).text
    assert not re.search(r"\b(None|nan|inf|null)\b", text)
    assert "–" in text
    for page in (full(), least()):
        assert not re.search(r"\b(None|nan|inf|null)\b", Page(page).text)


# Daily without plots: what is a name in one is text in test_plots.py.
@pytest.mark.parametrize("plots", daily([False, True], 0), ids=["no plots", "plots"])
def test_names_and_prompts_of_others_are_only_text(plots):
    found = copy.deepcopy(example())
    for server in found["servers"].values():
        server["model"]["model_name"] = HOSTILE
    found["settings"]["prompts"][0] |= {"text": HOSTILE, "name": f"<b>{HOSTILE}"}
    found["decision"]["headline"] = HOSTILE
    for record in found["records"]:
        record["prompt"] = record["prompt"].replace("extraction", HOSTILE)
    for condition in found["conditions"]:
        for of in condition["architectures"].values():
            of["workloads"][HOSTILE] = of["workloads"].pop("extraction")
    page = html(report_of(found), pictures_of(found) if plots else {})
    assert "script" not in Page(page).tags and "<b>" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 4
    assert Page(page).wrong == []


def test_another_version_is_refused_in_words():
    with pytest.raises(ValueError, match="schema_version 1; this renders 2"):
        report_of({"schema_version": 1})

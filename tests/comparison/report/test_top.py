"""What stands first: the decision with its doubt, and a verdict for each round trip that was asked for."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest

from tandem.comparison.report.html import html
from tandem.comparison.report.markdown import markdown
from tandem.comparison.report.sections import report_of
from tests.comparison.report.example_comparison import example, minimal


@cache
def full() -> dict[str, Any]:
    return example()


def changed(**decision: Any) -> dict[str, Any]:
    found = copy.deepcopy(full())
    found["decision"] |= decision
    return found


def strip(page: str) -> list[str]:
    (found,) = re.findall(r'<ol class="strip">(.*?)</ol>', page, re.DOTALL)
    return re.findall(r"<li.*?</li>", found, re.DOTALL)


@pytest.mark.parametrize("sureness", ["sure", "weak", "noise"])
def test_the_headline_has_the_mark_of_its_sureness_the_first_reason_and_what_would_make_it_surer(sureness: str) -> None:
    found = changed(sureness=sureness, reasons=["it rained", "it snowed"], surer=["in summer", "with --num-runs 5"])
    page = html(report_of(found), {})
    top = page[page.index('<section class="decision') : page.index('<dl class="figures">')]
    assert f'<section class="decision {sureness}"' in top and f'<span class="mark {sureness}">{sureness}</span>' in top
    assert "It rained.<br>To be surer, measure again in summer, with --num-runs 5." in top
    assert "<li>It snowed.</li>" in page and "It snowed" not in top
    assert f"How sure: {sureness}. It rained." in markdown(report_of(found), {})


def test_every_round_trip_has_a_verdict_with_its_own_mark_and_the_one_that_was_cut_off_has_none() -> None:
    found = copy.deepcopy(full())
    found["settings"]["rtts_ms"] = [0.0, 20.0, 50.0, 100.0, 300.0]
    verdicts = strip(html(report_of(found), {}))
    assert [re.findall('class="where">(.*?)<', one)[0] for one in verdicts] == [
        "0\N{NO-BREAK SPACE}ms, emulated", "20\N{NO-BREAK SPACE}ms, emulated", "50\N{NO-BREAK SPACE}ms, emulated",
        "100\N{NO-BREAK SPACE}ms, emulated", "300\N{NO-BREAK SPACE}ms",
    ]  # fmt: skip
    marks = [re.findall(r'class="mark (\w+)"', one) for one in verdicts]
    assert marks == [["sure"], ["sure"], ["weak"], ["noise"], []]
    assert "Not measured." in verdicts[-1] and "1.80× plain decoding (1.60 to 2.00)" in verdicts[0]
    text = markdown(report_of(found), {})
    assert all(f"| {where} ms" in text for where in (0, 20, 50, 100, 300))


def test_links_that_differ_in_more_than_the_round_trip_each_have_a_verdict() -> None:
    found = copy.deepcopy(full())
    other = next(c for c in found["conditions"] if c["varies"] == "link")
    twin = copy.deepcopy(other) | {"name": "a recorded link"}
    twin["link"] |= {"but": "recorded Cell"}
    found["conditions"].append(twin)
    own = next(v for v in found["verdicts"] if v["condition"] == other["name"])
    found["verdicts"].append(own | {"condition": "a recorded link", "headline": "On Cell, use lookup: copies"})
    wheres = [verdict.where for verdict in report_of(found).verdicts]
    rtt = other["link"]["rtt_ms"]
    assert f"{rtt:g} ms, emulated" in wheres and f"{rtt:g} ms, recorded Cell, emulated" in wheres
    assert "Use lookup: copies" in [verdict.headline for verdict in report_of(found).verdicts]
    page = html(report_of(found), {})
    assert len(strip(page)) == len(wheres) and "several links have the same round trip" in page


def test_one_round_trip_needs_no_strip() -> None:
    found = copy.deepcopy(full())
    found["conditions"] = [c for c in found["conditions"] if c["varies"] == "base"]
    assert report_of(found).verdicts == () and report_of(minimal()).verdicts == ()


def test_the_ratio_of_plain_decoding_is_over_the_fastest_that_drafts() -> None:
    found = copy.deepcopy(full())
    found["verdicts"][0] |= {"architecture": "autoregressive", "ratio": 1.2, "interval": None}
    assert report_of(found).verdicts[0].ratio == "1.20× the fastest that drafts"


def test_nothing_decided_offers_no_winner() -> None:
    report = report_of(changed(sureness="noise"))
    assert report.commands[0].heading == "Serve fused as measured: not decided, but the fastest so far"
    assert "Because" not in [reason.heading for reason in report.reasons]
    assert report_of(full()).commands[0].heading == "Serve fused as measured"


def test_another_choice_at_another_round_trip_has_its_commands_too() -> None:
    found = copy.deepcopy(full())
    found["verdicts"][1]["architecture"] = "distributed"
    found["verdicts"][3]["architecture"] = "remote_draft"  # noise: not a choice
    headings = [text.heading for text in report_of(found).commands]
    assert headings == ["Serve fused as measured", "Serve distributed as measured", ""]


def test_what_makes_a_run_doubtful_stands_above_the_decision() -> None:
    found = copy.deepcopy(full())
    found |= {"caveats": ["Not all servers were started alike."]}
    found |= {"partial": {"reason": "interrupted by SIGINT", "measured": 7, "planned": 50}}
    page = html(report_of(found), {})
    above = page[: page.index('<section class="decision')]
    said = ["This run is partial: interrupted by SIGINT; 7 of 50 requests were measured.", found["caveats"][0]]
    assert all(f"<p>{caution}</p>" in above for caution in said)
    assert all(f"\n> {caution}\n" in markdown(report_of(found), {}) for caution in said)
    assert 'class="cautions"' not in html(report_of(minimal()), {})


def test_every_statement_is_listed_with_how_sure_it_is() -> None:
    found = copy.deepcopy(full())
    found["statements"].append(
        found["statements"][0] | {"condition": "RTT 20 ms", "text": "another", "sureness": "noise"}
    )
    page = html(report_of(found), {})
    listed = page[page.index('<h2 id="found">') : page.index('<h2 id="architectures">')]
    for one in found["statements"]:
        assert one["text"][1:] in listed
    assert re.findall(r'<td[^>]*><span class="mark (\w+)">', listed) == ["sure", "sure", "weak", "noise"]
    assert "<summary>Under other conditions (1)</summary>" in listed


def test_a_file_without_doubts_is_shown_without_them() -> None:
    found = copy.deepcopy(full())
    for key in ("verdicts", "statements", "caveats"):
        del found[key]
    for key in ("sureness", "reasons", "surer", "brief", "ratios"):
        del found["decision"][key]
    report = report_of(found)
    page = html(report, {})
    assert (report.sureness, report.doubt, report.cautions) == ("", (), ()) and 'class="mark' not in page
    assert report.verdicts == () and '<h2 id="found">' not in page

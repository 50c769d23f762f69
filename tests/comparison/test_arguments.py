"""The command line of compare_architectures.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli import compare
from tandem.cli.compare import build_config, build_parser
from tandem.comparison.measuring.config import ONE_LENGTH, ComparisonConfig
from tandem.speculation.types import Rule, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
NO_TRACE = "trace:/no/up,/no/down"
NAMES = "autoregressive, lookup, distributed, never_waiting, fused, remote_draft"


def config(*arguments: str) -> ComparisonConfig:
    return build_config(build_parser().parse_args(arguments))


def test_the_defaults_are_a_whole_comparison() -> None:
    found = config()
    assert found.architectures == ("autoregressive", "lookup", "distributed", "never_waiting", "fused", "remote_draft")
    assert len(found.prompts) == 20
    assert (found.num_runs, found.max_new_tokens, found.speculation_length) == (1, 64, None)
    assert found.sampling.greedy
    assert found.output_dir.parent == Path("results")


@pytest.mark.parametrize("given", [(), ("--speculation-length", "auto")])
def test_servers_that_take_one_length_have_one_where_others_adapt(given: tuple[str, ...]) -> None:
    assert config(*given).speculation_length is None
    for one in (("--backend", "nxdi"), ("--device", "neuron")):
        asked = config(*given, *one, "--connect", "autoregressive=h:1", "--architectures", "autoregressive")
        assert asked.speculation_length == ONE_LENGTH == 3
    assert config("--speculation-length", "6", "--device", "cpu").speculation_length == 6


def test_values_of_flags_are_the_settings(tmp_path: Path) -> None:
    found = config(
        *("--temperature", "0.7,1", "--top_k", "5", "--min-p", "0.1", "--seed", "9", "--rule", "rejection"),
        *("--architectures", "fused, autoregressive", "--adapters", "sql=a", "--adapter", "sql", "--target_model", "X"),
        *("--connect", "fused=[::1]:50051", "--output-dir", str(tmp_path), "--timeout", "9", "--concurrency", "1,4"),
        *("--workloads", "code,prose", "--prompts-per-workload", "1"),
    )
    assert found.sampling == SamplingParams(temperature=0.7, top_k=5, min_p=0.1, seed=9)
    assert (found.temperature, found.rule, found.concurrency) == ((0.7, 1.0), (Rule.REJECTION,), (1, 4))
    assert (found.architectures, found.adapters, found.model) == (("fused", "autoregressive"), "sql=a", "X")
    assert (found.connect, found.output_dir, found.timeout) == ({"fused": "[::1]:50051"}, tmp_path, 9.0)
    assert [prompt.kind for prompt in found.prompts] == ["code", "prose"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--temperature -1", "temperature: -1.0 is not a finite number >= 0"),
        ("--temperature warm", "temperature: 'warm' is not a list of numbers"),
        ("--rtt-ms -1", "rtt-ms: -1 is not between 0 and 10000"),
        ("--rtt-ms 20,20", "rtt-ms: a value is named twice"),
        ("--bandwidth-mbps 0", "bandwidth-mbps: 0 is not between 0.01 and 100000"),
        ("--rule hope", "rule: 'hope' is not one of agreement, rejection"),
        ("--rtt-ms 5 --connect fused=a:1", "rtt-ms: only servers that are started here can be put"),
        ("--top-p 0", "top_p: 0.0 is outside (0, 1]"),
        ("--max-new-tokens 0", "max-new-tokens: 0 is below 1"),
        ("--max-new-tokens 512", "max-new-tokens: 512 leaves no room for a prompt in a sequence length of 512"),
        ("--weights int3", "weights: 'int3' is not one of auto, bfloat16, float32, int8, q4, as-stored"),
        ("--draft crystal", "draft: 'crystal' is not one of auto, hybrid, model, eagle, ngram"),
        ("--timeout inf", "timeout: inf is not a finite number above 0"),
        ("--architectures diffused", f"architectures: 'diffused' is not one of {NAMES}"),
        ("--architectures fused,fused", "architectures: 'fused' is named twice"),
        ("--architectures ,", f"architectures: name at least one of {NAMES}"),
        ("--connect fused", "connect: 'fused' is not ARCH=HOST:PORT"),
        ("--connect x=host:1", "connect: 'x' is not one of autoregressive, "),
        ("--connect fused=a:1 --connect fused=b:2", "connect: 'fused' is named twice"),
        ("--workloads poetry", "workloads: 'poetry' is not one of counting_and_lists, "),
        ("--prompt-file /nowhere/prompts.txt", "prompt file /nowhere/prompts.txt does not exist"),
        ("--prompt a --workloads code", "workloads: the built-in prompts do not go together with your own"),
        ("--raw", "raw: is for your own prompts"),
        (f"--output-dir {__file__}/deeper", f"output-dir: {__file__} is not a directory"),
        ("--concurrency 0", "concurrency: 0 is not between 1 and 1000"),
        ("--rate 0", "rate: 0 is not a finite number above 0 and at most 1000"),
        ("--mean-input-tokens 9", "mean-input-tokens: is for --concurrency and --rate, and neither is given"),
        ("--rate 1 --stddev-output-tokens 3", "stddev-output-tokens: is for --mean-output-tokens"),
        ("--rate 1 --mean-input-tokens 9 --stddev-input-tokens 10", "stddev-input-tokens: 10 is not between 0 and 9"),
        (
            "--rate 1 --mean-input-tokens 500",
            "mean-input-tokens: 500 and 64 new tokens exceed a sequence length of 512",
        ),
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
        # without effect
        ("--quiet --verbose", "quiet: prints the decision alone, without the requests of --verbose"),
        ("--backend toy --threads 1", "threads: --backend toy does not take it; torch does"),
        ("--backend nxdi --device neuron", "device: --backend nxdi does not take it; torch does"),
        ("--draft-cores 1", "draft-cores: give --cores as well, which these are some of"),
        ("--cores 0-1", "cores: name the --device whose cores these are"),
        ("--device cpu --cores 0-", "cores: '0-' is not a list of cores, as in 0-3 or 0,2"),
        ("--device cpu --cores 0-3 --draft-cores 3 --draft-device cpu", "draft-cores: --draft-device cpu leaves"),
        ("--device neuron --model tests/planning/configs/Llama-3.1-8B", "device: no Neuron device is found here"),
        ("--backend nxdi", "model: give --model DIR, whose config.json tells how it can be divided among cores"),
        ("--architectures fused --connect fused=h:1 --cores 0", "cores: is for servers that are started here"),
        ("--architectures fused --pipeline on", "pipeline: is for the architectures distributed and remote_draft"),
        ("--link emulated", "link: is for --rtt-ms and --bandwidth-mbps, and neither is given"),
        ("--architectures autoregressive --draft_model m", "draft-model: is for architectures that draft"),
        ("--adapters a=b", "adapters: name the one that requests have with --adapter"),
        ("--adapter a", "adapter: give --adapters as well"),
        ("--architectures autoregressive --draft-adapters a=b", "draft-adapters: is for architectures that draft"),
        (
            "--draft eagle --draft_model m",
            "draft: eagle reads its target's features, and a target that asks for drafts",
        ),
        ("--head h", "head: is for the architecture distributed_head"),
        # links and capacities
        ("--jitter-ms -1", "jitter-ms: -1 is not"),
        ("--up-mbps 0", "up-mbps: 0 is not"),
        ("--link trace:one", "link: 'trace:one' is not trace:UP,DOWN"),
        (f"--link {NO_TRACE}", "link: trace /no/up: No such file"),
        ("--link radio --rtt-ms 1", "link: 'radio' is not one of emulated, trace:UP,DOWN"),
        (f"--link {NO_TRACE} --link emulated", "link: of several, each is trace:UP,DOWN"),
        (f"--link {NO_TRACE} --link {NO_TRACE}", "link: one is named twice"),
        ("--capacity 0", "capacity: 0 is not a finite number above 0"),
        ("--capacity 9 --max-num-completed-requests 3", "max-num-completed-requests: --capacity has"),
        ("--capacity 9 --connect fused=127.0.0.1:1", "capacity: is for servers that are started here"),
    ],
)
def test_a_bad_argument_or_one_without_effect_is_one_line_and_exit_code_2(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        compare.main(line.split())
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith(f"compare_architectures.py: error: {said}")


def test_help_imports_nothing_heavy() -> None:
    source = (
        "import sys, compare_architectures as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'grpc', 'rich', 'transformers', 'accelerate', 'numpy', 'asyncio'} & {*sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--speculation-length" in found.stdout
    assert found.stdout.splitlines()[-1] == "[]"

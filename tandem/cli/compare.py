"""Compares plain, distributed, fused and remote-draft decoding on the same prompts: `tandem compare`.

Starts real server processes, or connects to running ones, and measures at the client. Appends each measurement to
records.jsonl as it comes, and writes comparison.json, comparison.csv, a report and a table from them. Imports nothing
heavy before the arguments are checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from tandem.cli.configuration import credentials
from tandem.cli.values import auto_or_count, numbers, split_list
from tandem.comparison.links.settings import LINK_KINDS
from tandem.comparison.measuring.architectures import DEFAULT, PIPELINED
from tandem.comparison.measuring.config import BACKENDS, DRAFTERS, DTYPES, PIPELINES, ComparisonConfig, parse_connect
from tandem.comparison.measuring.workloads import BUILT_IN, Prompt, built_in_prompts, given_prompts, read_prompt_file
from tandem.comparison.report.comparison_file import read_comparison
from tandem.comparison.report.write import write_report
from tandem.speculation.types import Rule, SamplingParams

PROMPTS_PER_WORKLOAD = 4
"""Keeps the default comparison within a few minutes on two cores."""


class Parser(argparse.ArgumentParser):
    """Adds each flag in hyphen and underscore spelling, and reports an error in one line."""

    def flag(self, *names: str, **settings: Any) -> None:
        spellings = [spelling for name in names for spelling in (name, "--" + name[2:].replace("-", "_"))]
        self.add_argument(*dict.fromkeys(spellings), **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser(program: str = "compare_architectures.py") -> Parser:
    """Builds the parser; `program` is the name that help and errors show."""
    parser = Parser(
        prog=program,
        description="Compare autoregressive, distributed, fused and remote-draft decoding on the same prompts.",
        epilog="Exit code: 0; 1 when a request or a file failed; 2 for a bad argument; 3 for a regression against"
        " --baseline; 4 when a server died; 130 by Ctrl-C, 143 by SIGTERM. What was measured by then is reported.",
        allow_abbrev=False,
    )
    _add_prompt_flags(parser)
    _add_generation_flags(parser)
    _add_link_flags(parser)
    _add_server_flags(parser)
    parser.flag(
        "--format", default="html", metavar="LIST", help="format of the report: html, md or both (default: html)"
    )
    parser.flag("--render", type=Path, metavar="FILE", help="measure nothing; write the report of this comparison.json")
    parser.flag(
        "--from-records", type=Path, metavar="FILE", help="measure nothing; analyse and report this records.jsonl"
    )
    parser.flag(
        "--baseline", type=Path, metavar="FILE", help="a comparison.json to compare with; regressions are flagged"
    )
    parser.flag("--output-dir", type=Path, metavar="DIR", help="folder for the files (default: results/<timestamp>)")
    return parser


def _add_prompt_flags(parser: Parser) -> None:
    parser.flag("--prompt-file", type=Path, metavar="FILE", help="one prompt per non-empty line")
    parser.flag("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    parser.flag("--chat", action="store_true", help="wrap your own prompts in the model's chat template")
    parser.flag("--workloads", metavar="KINDS", help=f"built-in prompts to use (default: {','.join(BUILT_IN)})")
    parser.flag(
        "--prompts-per-workload",
        type=int,
        metavar="N",
        help=f"built-in prompts of each kind (default: {PROMPTS_PER_WORKLOAD})",
    )
    parser.flag(
        "--num-runs",
        type=int,
        default=1,
        metavar="N",
        help="times each prompt is run; sampled: with seed, seed + 1, ... (default: 1)",
    )


def _add_generation_flags(parser: Parser) -> None:
    parser.flag("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to generate (default: 64)")
    parser.flag(
        "--speculation-length",
        default="3",
        metavar="auto|K",
        help="draft tokens per round (default: 3); auto: the fastest length by measurement, without a prediction",
    )
    parser.flag("--temperature", default="0", metavar="LIST", help="0 is greedy; the first of several is the base")
    parser.flag(
        "--rule", default="agreement", metavar="LIST", help="how drafts are verified: agreement, rejection or both"
    )
    parser.flag("--top-k", type=int, default=0, help="keep the k most likely tokens, 0 keeps all (default: 0)")
    parser.flag("--top-p", type=float, default=1.0, help="nucleus, in (0, 1] (default: 1)")
    parser.flag("--min-p", type=float, default=0.0, help="drop tokens below this fraction of the best (default: 0)")
    parser.flag("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    parser.flag(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="deadline of one request (default: 300)"
    )


def _add_link_flags(parser: Parser) -> None:
    parser.flag(
        "--rtt-ms", default="", metavar="LIST", help="emulated round trips, such as 0,20,50,100; the first is the base"
    )
    parser.flag(
        "--bandwidth-mbps",
        type=float,
        metavar="B",
        help="bandwidth of the emulated link in each direction (default: no limit)",
    )
    parser.flag(
        "--link",
        default="emulated",
        metavar="|".join(LINK_KINDS),
        help="a delay proxy on loopback, or the kernel's netem between network namespaces, which needs root",
    )


def _add_server_flags(parser: Parser) -> None:
    parser.flag(
        "--architectures",
        default=",".join(a.name for a in DEFAULT),
        metavar="LIST",
        help=f"architectures to compare (default: %(default)s; {PIPELINED.name} is also available)",
    )
    parser.flag(
        "--connect", action="append", default=[], metavar="ARCH=HOST:PORT", help="use a running server; may be repeated"
    )
    for name, metavar, text in (
        ("ca", "FILE", "connect with TLS; one of these CAs signed the servers' certificates"),
        ("client-cert", "FILE", "our certificate, for servers that require mTLS"),
        ("client-key", "FILE", "its private key"),
        ("server-name", "NAME", "the name in the servers' certificates, if it is not their host"),
    ):
        parser.flag(f"--tls-{name}", metavar=metavar, help=text)
    parser.flag("--token-file", metavar="FILE", help="a file with the token for the connected servers")
    parser.flag("--token-env", metavar="NAME", help="the environment variable with that token, instead of a file")
    parser.flag("--insecure", action="store_true", help="allow sending the token in clear text to other machines")
    parser.flag("--model", "--target-model", dest="model", metavar="MODEL", help="target (default: the embedded one)")
    parser.flag("--draft-model", metavar="MODEL", help="draft model")
    parser.flag("--draft", default="auto", metavar="|".join(DRAFTERS), help="drafter (default: auto)")
    parser.flag(
        "--pipeline",
        default="off",
        metavar="|".join(PIPELINES),
        help="distributed: send rounds before verdicts arrive (default: off)",
    )
    parser.flag(
        "--backend",
        default="torch",
        metavar="|".join(BACKENDS),
        help="torch, or toy: arithmetic instead of a model, for tests",
    )
    parser.flag("--dtype", default="auto", metavar="|".join(DTYPES), help="number format of the models (default: auto)")
    parser.flag("--threads", type=int, metavar="T", help="CPU threads of each server (default: the server's choice)")
    parser.flag(
        "--sequence-length",
        type=int,
        default=512,
        metavar="N",
        help="tokens per sequence, prompt included (default: 512)",
    )
    parser.flag("--batch", type=int, metavar="SLOTS", help="KV slots of each server (default: the server's choice)")
    parser.flag(
        "--startup-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long a server may take to start (default: 600)",
    )


RENDERING = {"render", "baseline", "format"}
STARTING = ("model", "draft_model", "draft", "dtype", "threads", "batch", "backend", "startup_timeout")


def flags_given(argv: Sequence[str]) -> set[str]:
    """Returns the names of the flags that a command line gives, in either spelling."""
    parser = build_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(argv)))


def refuse_unused_flags(arguments: argparse.Namespace, given: set[str]) -> None:
    """Raises ValueError for a flag that has no effect in combination with the others."""
    if arguments.render:
        for name in sorted(given - RENDERING):
            raise ValueError(f"{_flag(name)}: --render measures nothing; it takes --baseline and --format")
        return
    started = set(split_list(arguments.architectures)) - set(parse_connect(arguments.connect))
    for name in STARTING:
        if name in given and not started:
            raise ValueError(f"{_flag(name)}: is for servers that are started here, and all are connected")
    for name in ("dtype", "threads"):
        if name in given and arguments.backend == "toy":
            raise ValueError(f"{_flag(name)}: --backend toy does not take it; torch does")
    if "pipeline" in given and "distributed" not in started:
        raise ValueError("pipeline: is for the architecture distributed, which is not started here")
    if arguments.link in LINK_KINDS and "link" in given and not (arguments.rtt_ms or arguments.bandwidth_mbps):
        raise ValueError("link: is for --rtt-ms and --bandwidth-mbps, and neither is given")
    for name in ("draft_model", "draft"):
        if name in given and started <= {"autoregressive"}:
            raise ValueError(f"{_flag(name)}: is for architectures that draft, and none is started here")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def build_config(arguments: argparse.Namespace) -> ComparisonConfig:
    """Builds the comparison's configuration. Raises ValueError with a message of one line."""
    temperatures = numbers("temperature", arguments.temperature, float) or (0.0,)
    baseline = read_comparison(arguments.baseline, "baseline") if arguments.baseline else None
    return ComparisonConfig(
        prompts=choose_prompts(arguments),
        output_dir=arguments.output_dir or Path("results") / datetime.now().strftime("%Y%m%d-%H%M%S"),
        architectures=split_list(arguments.architectures),
        connect=parse_connect(arguments.connect),
        credentials=credentials(arguments),
        num_runs=arguments.num_runs,
        max_new_tokens=arguments.max_new_tokens,
        speculation_length=auto_or_count("speculation-length", arguments.speculation_length),
        rtts_ms=numbers("rtt-ms", arguments.rtt_ms, float),
        bandwidth_mbps=arguments.bandwidth_mbps,
        link=arguments.link,
        temperatures=temperatures,
        rules=tuple(Rule.named(name) for name in split_list(arguments.rule)),
        sampling=SamplingParams(
            temperature=temperatures[0],
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            seed=arguments.seed,
        ),
        sequence_length=arguments.sequence_length,
        batch=arguments.batch,
        threads=arguments.threads,
        backend=arguments.backend,
        dtype=arguments.dtype,
        model=arguments.model,
        draft_model=arguments.draft_model,
        draft=arguments.draft,
        pipeline=arguments.pipeline,
        timeout_s=arguments.timeout,
        startup_timeout_s=arguments.startup_timeout,
        baseline=baseline,
        formats=split_list(arguments.format),
    )


def choose_prompts(arguments: argparse.Namespace) -> tuple[Prompt, ...]:
    """Returns the prompts that the flags choose. Raises ValueError."""
    given = arguments.prompt_file is not None or arguments.prompt is not None
    built_in = arguments.workloads is not None or arguments.prompts_per_workload is not None
    if arguments.prompt_file is not None and arguments.prompt is not None:
        raise ValueError("prompt: give either --prompt or --prompt-file")
    if given and built_in:
        raise ValueError("workloads: the built-in prompts do not go together with your own")
    if arguments.chat and not given:
        raise ValueError("chat: is for your own prompts, the built-in ones know for themselves")
    if arguments.prompt_file is not None:
        return read_prompt_file(arguments.prompt_file, arguments.chat)
    if arguments.prompt is not None:
        return given_prompts(arguments.prompt, arguments.chat)
    per_workload = PROMPTS_PER_WORKLOAD if arguments.prompts_per_workload is None else arguments.prompts_per_workload
    kinds = tuple(BUILT_IN) if arguments.workloads is None else split_list(arguments.workloads)
    return built_in_prompts(kinds, per_workload)


def render_again(arguments: argparse.Namespace) -> int:
    """Writes the report of an earlier comparison again, and compares it with a baseline if one is given."""
    from tandem.comparison.analysis.regression import judge

    comparison = read_comparison(arguments.render, "render")
    files = write_report(comparison, arguments.render.parent, split_list(arguments.format))
    print("wrote " + ", ".join(str(path) for path in files if path.suffix != ".png"))
    return judge(read_comparison(arguments.baseline, "baseline"), comparison) if arguments.baseline else 0


def report_again(arguments: argparse.Namespace) -> int:
    """Analyses and reports a run's records again; the run may have been cut short."""
    from tandem.comparison.measuring.record_log import read_records
    from tandem.comparison.report.publishing import publish

    measured = read_records(arguments.from_records)
    if not measured.records:
        raise ValueError(f"from-records: {arguments.from_records} has no request that was measured")
    measured.config = replace(
        measured.config,
        output_dir=arguments.output_dir or measured.config.output_dir,
        formats=split_list(arguments.format),
        baseline=read_comparison(arguments.baseline, "baseline") if arguments.baseline else None,
    )
    return publish(measured, new=False)


def main(argv: Sequence[str] | None = None, program: str = "compare_architectures.py") -> int:
    """Runs a comparison and returns its exit code."""
    parser = build_parser(program)
    arguments = parser.parse_args(argv)
    try:
        refuse_unused_flags(arguments, flags_given(sys.argv[1:] if argv is None else argv))
        if arguments.render:
            return render_again(arguments)
        if arguments.from_records:
            return report_again(arguments)
        config = build_config(arguments)
    except ValueError as error:
        parser.error(str(error))
    from tandem.comparison.api import connector  # grpc and rich are imported only now
    from tandem.comparison.measuring.driver import run_comparison

    return run_comparison(config, connector(config))


if __name__ == "__main__":
    sys.exit(main())

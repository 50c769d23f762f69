"""Compares plain, distributed, fused and remote-draft decoding on the same prompts: `tandem compare`.

Starts real server processes, or connects to running ones, and measures at the client. Appends each measurement to
records.jsonl as it comes, and writes comparison.json, comparison.csv, loads.csv, a report and a table from them.
Imports nothing heavy before the arguments are checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tandem.cli.compare_flags import PROMPTS_PER_WORKLOAD, build_parser
from tandem.cli.compare_placement import placement_of, refuse_flags_of_other_backends
from tandem.cli.configuration import credentials
from tandem.cli.values import auto_or_count, numbers, split_list
from tandem.comparison.links.settings import LINK_KINDS
from tandem.comparison.measuring.architectures import HEADED
from tandem.comparison.measuring.config import ComparisonConfig, parse_connect
from tandem.comparison.measuring.workloads import BUILT_IN, Prompt, built_in_prompts, given_prompts, read_prompt_file
from tandem.comparison.report.comparison_file import read_comparison
from tandem.comparison.report.write import write_report
from tandem.speculation.types import Rule, SamplingParams

RENDERING = {"render", "baseline", "format"}
STARTING = (
    *(
        "model",
        "draft_model",
        "draft",
        "adapters",
        "draft_adapters",
        "head",
        "hand_out_features",
        "feature_format",
        "feature_context",
        "dtype",
        "weights",
        "threads",
        "batch",
        "backend",
        "device",
        "tp_degree",
        "cores",
    ),
    *("draft_cores", "draft_device", "compiled_dir", "neuron_config", "draft_neuron_config", "startup_timeout"),
)


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
    started = started_here(arguments)
    for name in STARTING:
        if name in given and not started:
            raise ValueError(f"{_flag(name)}: is for servers that are started here, and all are connected")
    refuse_flags_of_other_backends(arguments.backend, given)
    if "pipeline" in given and not started & {"distributed", "remote_draft", HEADED.name}:
        raise ValueError("pipeline: is for the architectures distributed and remote_draft, and neither is started here")
    if arguments.link in LINK_KINDS and "link" in given and not (arguments.rtt_ms or arguments.bandwidth_mbps):
        raise ValueError("link: is for --rtt-ms and --bandwidth-mbps, and neither is given")
    for name in ("draft_model", "draft", "draft_adapters"):
        if name in given and started <= {"autoregressive"}:
            raise ValueError(f"{_flag(name)}: is for architectures that draft, and none is started here")
    if arguments.draft == "eagle" and "remote_draft" in started:
        raise ValueError(
            "draft: eagle reads its target's features, and a target that asks for drafts sends none; leave remote_draft"
            " out of --architectures"
        )
    if "head" in given and HEADED.name not in started:
        raise ValueError(f"head: is for the architecture {HEADED.name}, and it is not started here")


def started_here(arguments: argparse.Namespace) -> set[str]:
    """Returns the architectures whose servers are started here."""
    return set(split_list(arguments.architectures)) - set(parse_connect(arguments.connect))


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
        concurrency=numbers("concurrency", arguments.concurrency, int),
        rate=numbers("rate", arguments.rate, float),
        max_num_completed_requests=arguments.max_num_completed_requests,
        mean_input_tokens=arguments.mean_input_tokens,
        stddev_input_tokens=arguments.stddev_input_tokens,
        mean_output_tokens=arguments.mean_output_tokens,
        stddev_output_tokens=arguments.stddev_output_tokens,
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
        device=arguments.device,
        tp_degree=arguments.tp_degree,
        placement=placement_of(arguments, started_here(arguments)),
        draft_device=arguments.draft_device,
        neuron_config=arguments.neuron_config,
        draft_neuron_config=arguments.draft_neuron_config,
        compiled_dir=arguments.compiled_dir,
        dtype=arguments.dtype,
        weights=arguments.weights,
        model=arguments.model,
        draft_model=arguments.draft_model,
        draft=arguments.draft,
        adapters=arguments.adapters,
        draft_adapters=arguments.draft_adapters,
        adapter=arguments.adapter or "",
        head=arguments.head,
        hand_out_features=arguments.hand_out_features,
        feature_format=arguments.feature_format,
        feature_context=arguments.feature_context,
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

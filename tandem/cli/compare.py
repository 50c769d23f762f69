"""`tandem compare`: measures plain, distributed, fused and remote-draft decoding on the same prompts.

Starts server processes or connects to running ones, appends each measurement to records.jsonl, and publishes the run.
Imports nothing heavy before the options are checked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tandem.cli.compare_flags import COMPARE_FLAGS, PROMPTS_PER_WORKLOAD, STARTED, CompareOptions, build_parser
from tandem.cli.compare_placement import placement_of, refuse_flags_of_other_backends
from tandem.cli.option import built
from tandem.cli.values import auto_or_count, credentials, numbers, split_list
from tandem.comparison.links.settings import LINK_KINDS
from tandem.comparison.measuring.architectures import HEADED
from tandem.comparison.measuring.config import ComparisonConfig, parse_connect
from tandem.comparison.measuring.workloads import BUILT_IN, Prompt, built_in_prompts, given_prompts, read_prompt_file
from tandem.speculation.sampling import member_named
from tandem.speculation.types import Rule, SamplingParams

STARTING = tuple(name for name, flag in COMPARE_FLAGS.items() if flag.group == STARTED)


def refuse_unused_flags(options: CompareOptions) -> None:
    """Raises ValueError for a flag that others make ineffective."""
    if options.render:
        for name in sorted(options.given - {"render"}):
            raise ValueError(f"{_flag(name)}: --render measures nothing, and takes no other flag")
        return
    started = started_here(options)
    for name in STARTING:
        if name in options.given and not started:
            raise ValueError(f"{_flag(name)}: is for servers that are started here, and all are connected")
    refuse_flags_of_other_backends(options)
    if "pipeline" in options.given and not started & {"distributed", "remote_draft", HEADED.name}:
        raise ValueError("pipeline: is for the architectures distributed and remote_draft, and neither is started here")
    emulating = options.rtt_ms or options.given & {"bandwidth_mbps", "up_mbps", "up_share", "jitter_ms"}
    if options.link[0] in LINK_KINDS and "link" in options.given and not emulating:
        raise ValueError("link: is for --rtt-ms and --bandwidth-mbps, and neither is given")
    for name in ("draft_model", "draft", "draft_adapters"):
        if name in options.given and started <= {"autoregressive"}:
            raise ValueError(f"{_flag(name)}: is for architectures that draft, and none is started here")
    if options.draft == "eagle" and "remote_draft" in started:
        raise ValueError(
            "draft: eagle reads its target's features, and a target that asks for drafts sends none; leave remote_draft"
            " out of --architectures"
        )
    if "head" in options.given and HEADED.name not in started:
        raise ValueError(f"head: is for the architecture {HEADED.name}, and it is not started here")


def started_here(options: CompareOptions) -> set[str]:
    """The architectures whose servers start on this host."""
    return set(split_list(options.architectures)) - set(parse_connect(options.connect))


def _flag(name: str) -> str:
    return name.replace("_", "-")


def build_config(options: CompareOptions) -> ComparisonConfig:
    """Raises ValueError, one line."""
    temperatures = numbers("temperature", options.temperature, float) or (0.0,)
    return built(
        ComparisonConfig,
        options,
        prompts=choose_prompts(options),
        output_dir=options.output_dir or Path("results") / datetime.now().strftime("%Y%m%d-%H%M%S"),
        architectures=split_list(options.architectures),
        connect=parse_connect(options.connect),
        credentials=credentials(options),
        speculation_length=auto_or_count("speculation-length", options.speculation_length),
        rtts_ms=numbers("rtt-ms", options.rtt_ms, float),
        link=options.link[0],
        other_links=options.link[1:],
        concurrency=numbers("concurrency", options.concurrency, int),
        rate=numbers("rate", options.rate, float),
        capacity_ms=options.capacity,
        temperatures=temperatures,
        rules=tuple(member_named(Rule, "rule", name) for name in split_list(options.rule)),
        sampling=built(SamplingParams, options, temperature=temperatures[0]),
        placement=placement_of(options, started_here(options)),
        timeout_s=options.timeout,
        startup_timeout_s=options.startup_timeout,
    )


def choose_prompts(options: CompareOptions) -> tuple[Prompt, ...]:
    """The prompts of the flags. Raises ValueError."""
    given = options.prompt_file is not None or options.prompt
    if options.prompt_file is not None and options.prompt:
        raise ValueError("prompt: give either --prompt or --prompt-file")
    if given and (options.workloads is not None or options.prompts_per_workload is not None):
        raise ValueError("workloads: the built-in prompts do not go together with your own")
    if options.raw and not given:
        raise ValueError("raw: is for your own prompts, the built-in ones know for themselves")
    if options.prompt_file is not None:
        return read_prompt_file(options.prompt_file, chat=not options.raw)
    if options.prompt:
        return given_prompts(options.prompt, chat=not options.raw)
    per_workload = PROMPTS_PER_WORKLOAD if options.prompts_per_workload is None else options.prompts_per_workload
    kinds = tuple(BUILT_IN) if options.workloads is None else split_list(options.workloads)
    return built_in_prompts(kinds, per_workload)


def render_again(path: Path) -> int:
    """Writes an earlier comparison's page again."""
    from tandem.comparison.analysis.comparison import read_comparison
    from tandem.comparison.report.publish import write_page

    print(f"wrote {write_page(read_comparison(path, 'render'), path.parent)}")
    return 0


def report_again(path: Path, options: CompareOptions) -> int:
    """Analyses and reports the records of a run, complete or not."""
    from tandem.comparison.measuring.record_log import read_records
    from tandem.comparison.report.publish import publish

    measured = read_records(path)
    if not measured.records:
        raise ValueError(f"from-records: {path} has no request that was measured")
    measured.config = replace(measured.config, output_dir=options.output_dir or measured.config.output_dir)
    return publish(measured)


def main(argv: Sequence[str] | None = None, program: str = "compare_architectures.py") -> int:
    """Runs a comparison and returns its exit code."""
    parser = build_parser(program)
    options = parser.parse_args(argv)
    try:
        refuse_unused_flags(options)
        if options.render:
            return render_again(options.render)
        if options.from_records:
            return report_again(options.from_records, options)
        config = build_config(options)
    except ValueError as error:
        parser.error(str(error))
    from tandem.comparison.api import connector  # grpc and rich are imported only now
    from tandem.comparison.measuring.driver import run_comparison
    from tandem.comparison.report.publish import publish

    return run_comparison(config, connector(config), publish)


if __name__ == "__main__":
    sys.exit(main())

"""`tandem compare`: measures architectures on the same prompts. Imports nothing heavy until the options are checked."""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.compare_flags import COMPARE_FLAGS, PROMPTS_PER_WORKLOAD, build_parser
from tandem.cli.option import credentials, flags_of, split_list
from tandem.comparison.links.link_settings import LINK_KINDS
from tandem.comparison.measuring.architectures import COMPARED, HEADED
from tandem.comparison.measuring.config import ONE_LENGTH, STARTED, ComparisonConfig, parse_connect
from tandem.comparison.measuring.workloads import BUILT_IN, Prompt, built_in_prompts, given_prompts, read_prompt_file
from tandem.host.cores import parse_cores
from tandem.host.devices import find_devices
from tandem.workshops.planning.host_placement import HostPlacement, place_on_cpus, place_on_gpus, place_on_neuron
from tandem.workshops.planning.plan import PlanConfig
from tandem.workshops.planning.shapes import holds_head

if TYPE_CHECKING:
    from tandem.comparison.measuring.record_log import RunData
    from tandem.comparison.report.printed import Detail

SPLIT = {architecture.name for architecture in COMPARED.values() if architecture.split}
EMULATING = {"rtt_ms", "bandwidth_mbps", "up_mbps", "jitter_ms"}


def refuse_unused_flags(options: Namespace) -> None:
    """Raises ValueError for the first flag that others make ineffective."""
    given, started = options.given, started_here(options)
    for name, flag in COMPARE_FLAGS.items():
        cuts = name in ("model", "backend") and "mean_input_tokens" in given  # whose tokenizer cuts prompts
        if name in given and flag.group == STARTED and not started and not cuts:
            raise ValueError(f"{_flag(name)}: is for servers that are started here, and all are connected")
        if name in given and options.backend not in flag.backends:
            others = f"{' and '.join(flag.backends)} {'do' if len(flag.backends) > 1 else 'does'}"
            raise ValueError(f"{_flag(name)}: --backend {options.backend} does not take it; {others}")
    if "pipeline" in given and not started & {"distributed", "remote_draft", HEADED.name}:
        raise ValueError("pipeline: is for the architectures distributed and remote_draft, and neither is started here")
    if "link" in given and options.link[0] in LINK_KINDS and not given & EMULATING:
        raise ValueError("link: is for --rtt-ms and --bandwidth-mbps, and neither is given")
    for name in ("draft_model", "draft", "draft_adapters"):
        if name in given and started <= {"autoregressive"}:
            raise ValueError(f"{_flag(name)}: is for architectures that draft, and none is started here")
    if options.draft == "eagle" and "remote_draft" in started:
        raise ValueError(
            "draft: eagle reads its target's features, and a target that asks for drafts sends none; leave remote_draft"
            " out of --architectures"
        )
    if options.quiet and options.verbose:
        raise ValueError("quiet: prints the decision alone, without the requests of --verbose")
    if "head" in given and HEADED.name not in started:
        raise ValueError(f"head: is for the architecture {HEADED.name}, and it is not started here")


def started_here(options: Namespace) -> set[str]:
    return set(options.architectures) - set(parse_connect(options.connect))


def _flag(name: str) -> str:
    return name.replace("_", "-")


def build_config(options: Namespace) -> ComparisonConfig:
    own = {name: getattr(options, name) for name in flags_of(ComparisonConfig)}
    return ComparisonConfig(
        prompts=choose_prompts(options),
        output_dir=options.output_dir or Path("results") / datetime.now().strftime("%Y%m%d-%H%M%S"),
        connect=parse_connect(options.connect),
        credentials=credentials(options),
        placement=placement_of(options, started_here(options)),
        **own,
    )


def choose_prompts(options: Namespace) -> tuple[Prompt, ...]:
    if options.prompt_file is not None and options.prompt:
        raise ValueError("prompt: give either --prompt or --prompt-file")
    if options.prompt_file is not None or options.prompt:
        if options.workloads is not None or options.prompts_per_workload is not None:
            raise ValueError("workloads: the built-in prompts do not go together with your own")
        if options.prompt_file is not None:
            return read_prompt_file(options.prompt_file, chat=not options.raw)
        return given_prompts(options.prompt, chat=not options.raw)
    if options.raw:
        raise ValueError("raw: is for your own prompts, the built-in ones know for themselves")
    per_workload = PROMPTS_PER_WORKLOAD if options.prompts_per_workload is None else options.prompts_per_workload
    return built_in_prompts(split_list(options.workloads) if options.workloads is not None else BUILT_IN, per_workload)


def placement_of(options: Namespace, started: Collection[str]) -> HostPlacement | None:
    """Returns the cores of the servers of `started`; None: the system's choice. Raises ValueError.

    Neuron cores are always placed, because a process takes all cores unless some are named.
    """
    if not started:
        return None
    if options.draft_device and options.draft_cores:
        raise ValueError("draft-cores: --draft-device cpu leaves the draft no cores of the device")
    cores = parse_cores(options.cores) if options.cores else None
    draft = parse_cores(options.draft_cores, "draft-cores") if options.draft_cores else None
    if options.backend == "nxdi" or options.device == "neuron":
        apart = bool(set(started) & SPLIT) and options.draft_device is None
        return place_on_neuron(_plan_of(options), find_devices(Path("/"), os.environ), cores, draft, apart)
    if cores is None:
        if draft is not None:
            raise ValueError("draft-cores: give --cores as well, which these are some of")
        return None
    if options.device not in ("cpu", "cuda"):
        raise ValueError("cores: name the --device whose cores these are")
    place = place_on_cpus if options.device == "cpu" else place_on_gpus
    return place(cores, draft, options.tp_degree)


def _plan_of(options: Namespace) -> PlanConfig:
    if options.model is None:
        raise ValueError("model: give --model DIR, whose config.json tells how it can be divided among cores")
    length, draft = options.speculation_length, options.draft_model
    return PlanConfig(
        instance="found",
        target_model=options.model,
        draft_model=None if not draft or options.draft == "ngram" or holds_head(draft) else draft,
        backend=options.backend,
        dtype=options.dtype,
        batch=4 if options.batch is None else options.batch,
        length=options.sequence_length,
        drafts=ONE_LENGTH if length is None else length or 5,
        degree=options.tp_degree if options.tp_degree > 1 else None,
    )


def report_again(path: Path, options: Namespace) -> int:
    """Analyses and reports the records of a run or of a first hour's bundle, complete or not."""
    from tandem.comparison.measuring.bundle import how_far, read_about, records_in
    from tandem.comparison.measuring.record_log import read_records

    if path.suffixes[-2:] == [".tar", ".gz"]:
        print(how_far(read_about(path)), file=sys.stderr)  # --json has stdout to itself
        with tempfile.TemporaryDirectory() as scratch:
            measured = read_records(records_in(path, Path(scratch)))
    else:
        measured = read_records(path)
    if not measured.records:
        raise ValueError(f"from-records: {path} has no request that was measured")
    measured.config = replace(measured.config, output_dir=options.output_dir or measured.config.output_dir)
    return publisher(options)(measured)


def publisher(options: Namespace) -> Callable[[RunData], int]:
    from tandem.comparison.report.publish import publish

    detail: Detail = "json" if options.json else "decision" if options.quiet else "all" if options.verbose else "short"
    return partial(publish, detail=detail)


def main(argv: Sequence[str] | None = None, program: str = "compare_architectures.py") -> int:
    parser = build_parser(program)
    options = parser.parse_args(argv)
    try:
        refuse_unused_flags(options)
        if options.from_records:
            return report_again(options.from_records, options)
        config = build_config(options)
    except ValueError as error:
        parser.error(str(error))
    from rich.console import Console

    from tandem.comparison.api import connector  # grpc is imported only now
    from tandem.comparison.measuring.driver import run_comparison
    from tandem.comparison.measuring.progress import Progress

    progress = Progress(None if not options.quiet else Console(quiet=True), options.verbose)
    return run_comparison(config, connector(config), publisher(options), progress)

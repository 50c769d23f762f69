"""Builds the commands of the servers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.config import MIN_SLOTS, ComparisonConfig
from tandem.launch import LAUNCH
from tandem.workshops.planning.host_placement import CoreGroup, pair_for

MIN_LENGTH = 5  # least maximum length of servers, so that several lengths can be calibrated
PIPELINES = {arch.PIPELINED.name: "on", arch.NEVER_WAITING.name: "never-waiting"}


def target_command(
    config: ComparisonConfig, drafting: Collection[str] = (), speculation_length: int | None = None
) -> list[str]:
    """Returns the command of a target that decodes plainly, or verifies for the architectures `drafting`."""
    features = arch.HEADED.name in drafting or (drafting and config.drafts_with_head)
    handing = ("--hand_out_features", config.hand_out_features) if features else ()
    group = config.groups.target if drafting else config.groups.whole
    return server_command(config, "target", *handing, group=group, speculation_length=speculation_length)


def beside_command(config: ComparisonConfig, architecture: str) -> list[str]:
    """Returns the command of fused decoding or lookup."""
    group = config.groups.whole
    if architecture == arch.LOOKUP.name:
        config = replace(config, draft="ngram", draft_model=None, draft_adapters=None, draft_neuron_config=None)
    return server_command(config, "fused_target", group=group)


def worker_command(config: ComparisonConfig, architecture: str, target: str, *extra: str) -> list[str]:
    """Returns the command of a draft worker for the target at HOST:PORT."""
    if architecture == arch.HEADED.name:
        config = replace(config, draft="eagle", draft_model=config.head)
    if config.capacity is not None:
        config = replace(config, batch=config.batch or MIN_SLOTS)
    host, _, port = target.rpartition(":")
    pipeline = PIPELINES.get(architecture, config.pipeline or "off")
    where = ("--target_host", host.strip("[]"), "--target_port", port, "--pipeline", pipeline)
    if config.drafts_with_head:
        context = () if config.feature_context is None else ("--feature_context", str(config.feature_context))
        extra = (*extra, *context)
    return server_command(config, "draft_worker", *where, *extra, group=config.groups.draft)


def proposing_command(config: ComparisonConfig) -> list[str]:
    """Returns the command of a draft worker for targets that ask."""
    return server_command(config, "draft_worker", "--propose_only", group=config.groups.draft)


def asking_command(config: ComparisonConfig, worker: str, *extra: str) -> list[str]:
    """Returns the command of a target that asks the draft worker at HOST:PORT."""
    pipeline = "off" if config.pipeline == "on" else config.pipeline or "auto"  # it has one round at a time
    asking = ("--draft_host", worker, "--pipeline", pipeline)
    return server_command(config, "target", *asking, *extra, group=config.groups.target)


def server_command(
    config: ComparisonConfig,
    role: str,
    *extra: str,
    group: CoreGroup | None = None,
    speculation_length: int | None = None,
) -> list[str]:
    """Returns a server's command. `group`: its cores; None for a draft without a place."""
    if role == "draft_worker" and config.draft_device:
        config = replace(config, backend="torch", device=config.draft_device, compiled_dir=None, neuron_config=None)
    length = most_drafts(config) if speculation_length is None else speculation_length
    command = [*LAUNCH, "--role", role, "--host", "127.0.0.1", "--port", "0"]
    command += ["--max_speculation_length", str(length), "--sequence_length", str(config.sequence_length)]
    command += ["--backend", config.backend, "--prefix_sharing", "off"]  # a prompt costs the same in every run
    drafts = role != "target"
    named = drafts and "--propose_only" not in extra  # otherwise callers name no adapter of the draft
    chosen: dict[str, object] = {
        "--target_model" if drafts else "--model": config.model,
        "--draft_model": config.draft_model if drafts else None,
        "--draft": config.draft if drafts else None,
        "--adapters": None if role == "draft_worker" else config.adapters,
        "--draft_adapters": config.draft_adapters if named else None,
        "--batch": config.slots,
        "--threads": config.threads,
        "--dtype": None if config.dtype == "auto" else config.dtype,
        "--weights": None if config.weights == "auto" else config.weights,
        "--device": None if config.device == "auto" else config.device,
        "--tp_degree": group.degree if group and group.degree > 1 else None,
        "--cores": group.cores if group else None,
        "--compiled_dir": config.compiled_dir,
        "--rehearse": config.rehearse,
        "--neuron_config": config.neuron_config,
    }
    if role == "fused_target":
        temperatures = [condition.request.sampling.temperature for condition in config.conditions]
        chosen["--draft_neuron_config"] = config.draft_neuron_config
        chosen["--pair"] = pair_for(config.backend, temperatures)
    for flag, value in chosen.items():
        command += [flag, str(value)] if value not in (None, "") else []
    return [*command, *extra]


def most_drafts(config: ComparisonConfig) -> int:
    """Returns the servers' maximum length; on Neuron every round is as long, so calibration adds nothing."""
    if config.speculation_length and config.one_length:
        return config.speculation_length
    return max(config.speculation_length or 0, min(MIN_LENGTH, config.sequence_length - 1))

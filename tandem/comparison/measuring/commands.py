"""Builds the commands of the servers."""

from __future__ import annotations

from dataclasses import replace

from tandem.comparison.measuring.config import ComparisonConfig
from tandem.launch import LAUNCH
from tandem.workshops.planning.host_placement import CoreGroup, pair_for

MIN_LENGTH = 5  # least maximum length of servers, so that several lengths can be calibrated


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


def lookup_alone(config: ComparisonConfig) -> ComparisonConfig:
    """Returns the configuration without a draft model."""
    return replace(config, draft="ngram", draft_model=None, draft_adapters=None, draft_neuron_config=None)


def most_drafts(config: ComparisonConfig) -> int:
    """Returns the servers' maximum length; on Neuron every round is as long, so calibration adds nothing."""
    if config.speculation_length and config.one_length:
        return config.speculation_length
    return max(config.speculation_length or 0, min(MIN_LENGTH, config.sequence_length - 1))


def whole_of(config: ComparisonConfig) -> CoreGroup:
    """Returns the cores of plain and fused decoding."""
    return config.placement.whole if config.placement else CoreGroup("", config.tp_degree)


def target_of(config: ComparisonConfig) -> CoreGroup:
    """Returns the cores of a target whose draft is elsewhere."""
    return config.placement.target if config.placement else CoreGroup("", config.tp_degree)


def feature_flags(config: ComparisonConfig) -> list[str]:
    """Returns the feature flags of a draft worker with an EAGLE-3 head."""
    if not config.drafts_with_head:
        return []
    context = [] if config.feature_context is None else ["--feature_context", str(config.feature_context)]
    return ["--feature_format", config.feature_format, *context]

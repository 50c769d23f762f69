"""Builds the commands that serve an architecture as it was measured, with the flags of the comparison's own servers."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.commands import feature_flags, lookup_alone, server_command, target_of, whole_of
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.json_form import decoded
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report.blocks import Text
from tandem.comparison.report.reading import JSON
from tandem.launch import LAUNCH
from tandem.workshops.planning.host_placement import CoreGroup

PORT, DRAFT_PORT = "50051", "50052"
LOOPBACK = "127.0.0.1"
QUESTION = "Why is the sky blue?"
PIPELINES = {arch.PIPELINED.name: "on", arch.NEVER_WAITING.name: "never-waiting"}
OF_THE_COMPARISON = ("--host", "--port", "--prefix_sharing", "--rehearse")
"""Flags with values that only measuring asks for."""
DEFAULTS = (["--backend", "torch"], ["--pipeline", "off"], ["--draft", "auto"])


def deployment(comparison: JSON, architecture: str) -> Text:
    """Returns the commands that serve `architecture`, or one that asks it where it was connected."""
    name, server = fmt.name_in_sentence(architecture), comparison["servers"].get(architecture)
    if server and not server["started_here"]:
        host, _, port = server["address"].rpartition(":")
        if "://" in server["address"]:
            url = server["address"].rstrip("/").removesuffix("/v1")
            body = json.dumps({"model": server["model"]["model_name"], "prompt": QUESTION})
            ask = ["curl", f"{url}/v1/completions", "--json", body]
            return Text("command", (shlex.join(ask),), f"{fmt.capitalised(name)} runs already. Ask it")
        ask = ["tandem", "client", "--target_host", host, "--port", port, "--prompt", QUESTION]
        return Text("command", (shlex.join(ask),), f"{fmt.capitalised(name)} runs already. Ask it")
    config = decoded(ComparisonConfig, {**comparison["settings"], "connect": {}})
    lines = tuple(shlex.join(["tandem", *command]) for command in commands(config, architecture))
    return Text("command", lines, f"Serve {name} as measured")


def commands(config: ComparisonConfig, architecture: str) -> list[list[str]]:
    """Returns the commands of the servers of an architecture, in the order to start them, without `tandem`."""
    length = ["--speculation_length", fmt.length(config.speculation_length)]
    draft = config.placement.draft if config.placement else None
    if architecture in arch.PLAIN:
        return [_command(config, "target", [], whole_of(config), PORT)]
    if architecture in (arch.FUSED.name, arch.LOOKUP.name):
        beside = lookup_alone(config) if architecture == arch.LOOKUP.name else config
        return [_command(beside, "fused_target", length, whole_of(beside), PORT)]
    if architecture == arch.REMOTE_DRAFT.name:
        drafting = ["--draft_host", f"{LOOPBACK}:{DRAFT_PORT}", "--pipeline", _unless_on(config.pipeline), *length]
        return [
            _command(config, "draft_worker", ["--propose_only"], draft, DRAFT_PORT),
            _command(config, "target", drafting, target_of(config), PORT),
        ]
    headed = architecture == arch.HEADED.name
    worker = replace(config, draft="eagle", draft_model=config.head) if headed else config
    handing = ["--hand_out_features", config.hand_out_features] if worker.drafts_with_head else []
    pipeline = ["--pipeline", PIPELINES.get(architecture, config.pipeline)]
    where = ["--target_host", LOOPBACK, "--target_port", PORT, *pipeline, *length, *feature_flags(worker)]
    return [
        _command(config, "target", handing, target_of(config), PORT),
        _command(worker, "draft_worker", where, draft, DRAFT_PORT),
    ]


def _command(config: ComparisonConfig, role: str, extra: list[str], group: CoreGroup | None, port: str) -> list[str]:
    """Returns a measured server's command without what only measuring asks for."""
    flags, kept = server_command(config, role, *extra, group=group)[len(LAUNCH) + 2 :], []
    while flags:
        flag = flags.pop(0)
        values = [flags.pop(0)] if flags and not flags[0].startswith("--") else []
        kept += [flag, *values] if flag not in OF_THE_COMPARISON and [flag, *values] not in DEFAULTS else []
    return [role, *kept, "--port", port]


def _unless_on(pipeline: str) -> str:
    """A target with a remote draft has one round at a time, or never waits."""
    return "off" if pipeline == "on" else pipeline

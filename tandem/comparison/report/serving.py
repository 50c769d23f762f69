"""The commands that serve an architecture with its measured flags."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace

from tandem.comparison.analysis.comparison import Comparison
from tandem.comparison.analysis.words import capitalised, name_in_sentence
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.commands import feature_flags, lookup_alone, server_command, target_of, whole_of
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.launch import LAUNCH
from tandem.workshops.planning.host_placement import CoreGroup

PORT, DRAFT_PORT = "50051", "50052"
LOOPBACK = "127.0.0.1"
QUESTION = "Why is the sky blue?"
PIPELINES = {arch.PIPELINED.name: "on", arch.NEVER_WAITING.name: "never-waiting"}
OF_THE_COMPARISON = ("--host", "--port", "--prefix_sharing", "--rehearse")  # flags with values for measuring only
DEFAULTS = (["--backend", "torch"], ["--pipeline", "off"], ["--draft", "auto"])
APART = f"On two machines, put the other's address in place of {LOOPBACK}, and secure both (docs/security.md)."


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands in the order to run them."""

    heading: str
    lines: tuple[str, ...]
    note: str = ""


def deployment(found: Comparison, architecture: str) -> Commands:
    """Returns the commands that serve `architecture`, or a client's if it was connected."""
    name = name_in_sentence(architecture)
    server = next((e for e in found.endpoints if e.architecture.name == architecture), None)
    if server and server.log is None:
        return Commands(f"{capitalised(name)} runs already. Ask it", (_asking(server),))
    lines = tuple(shlex.join(["tandem", *command]) for command in commands(found.config, architecture))
    return Commands(f"Serve {name} as measured", lines, APART if len(lines) > 1 else "")


def _asking(server: Endpoint) -> str:
    if "://" in server.address:
        url = server.address.rstrip("/").removesuffix("/v1")
        body = json.dumps({"model": server.model.model_name, "prompt": QUESTION})
        return shlex.join(["curl", f"{url}/v1/completions", "--json", body])
    host, _, port = server.address.rpartition(":")
    return shlex.join(["tandem", "client", "--target_host", host, "--port", port, "--prompt", QUESTION])


def commands(config: ComparisonConfig, architecture: str) -> list[list[str]]:
    """Returns the server commands of an architecture in starting order, without `tandem`."""
    length = ["--speculation_length", "auto" if config.speculation_length is None else str(config.speculation_length)]
    draft = config.placement.draft if config.placement else None
    if architecture in arch.PLAIN:
        return [_command(config, "target", [], whole_of(config), PORT)]
    if architecture in (arch.FUSED.name, arch.LOOKUP.name):
        beside = lookup_alone(config) if architecture == arch.LOOKUP.name else config
        return [_command(beside, "fused_target", length, whole_of(beside), PORT)]
    if architecture == arch.REMOTE_DRAFT.name:
        one_at_a_time = "off" if config.pipeline == "on" else config.pipeline
        drafting = ["--draft_host", f"{LOOPBACK}:{DRAFT_PORT}", "--pipeline", one_at_a_time, *length]
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
    """Returns a server's command without flags for measuring only."""
    flags, kept = server_command(config, role, *extra, group=group)[len(LAUNCH) + 2 :], []
    while flags:
        flag = flags.pop(0)
        values = [flags.pop(0)] if flags and not flags[0].startswith("--") else []
        kept += [flag, *values] if flag not in OF_THE_COMPARISON and [flag, *values] not in DEFAULTS else []
    return [role, *kept, "--port", port]

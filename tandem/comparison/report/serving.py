"""The commands that serve an architecture with its measured flags."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from tandem.comparison.analysis.comparison import Comparison
from tandem.comparison.analysis.words import capitalised, name_in_sentence
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.commands import (
    asking_command,
    beside_command,
    proposing_command,
    target_command,
    worker_command,
)
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.launch import LAUNCH

PORT, DRAFT_PORT = "50051", "50052"
LOOPBACK = "127.0.0.1"
QUESTION = "Why is the sky blue?"
OF_THE_COMPARISON = ("--host", "--port", "--prefix_sharing", "--rehearse")  # flags with values for measuring only
DEFAULTS = (["--backend", "torch"], ["--pipeline", "off"], ["--draft", "auto"])
APART = f"On two machines, put the other's address in place of {LOOPBACK}, and secure both (docs/security.md)."


@dataclass(frozen=True, slots=True)
class Commands:
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
    if architecture in arch.PLAIN:
        return [_shown(target_command(config), PORT)]
    if architecture in (arch.FUSED.name, arch.LOOKUP.name):
        return [_shown([*beside_command(config, architecture), *length], PORT)]
    if architecture == arch.REMOTE_DRAFT.name:
        target = asking_command(config, f"{LOOPBACK}:{DRAFT_PORT}", *length)
        return [_shown(proposing_command(config), DRAFT_PORT), _shown(target, PORT)]
    worker = worker_command(config, architecture, f"{LOOPBACK}:{PORT}", *length)
    return [_shown(target_command(config, (architecture,)), PORT), _shown(worker, DRAFT_PORT)]


def _shown(command: list[str], port: str) -> list[str]:
    """Returns a server's role and flags, without those for measuring only."""
    (_, role, *flags), kept = command[len(LAUNCH) :], list[str]()
    while flags:
        flag = flags.pop(0)
        values = [flags.pop(0)] if flags and not flags[0].startswith("--") else []
        kept += [flag, *values] if flag not in OF_THE_COMPARISON and [flag, *values] not in DEFAULTS else []
    return [role, *kept, "--port", port]

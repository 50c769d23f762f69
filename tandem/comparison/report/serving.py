"""The commands that serve an architecture here, with its measured flags."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from tandem.comparison.analysis.comparison import Comparison
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.commands import (
    asking_command,
    beside_command,
    proposing_command,
    target_command,
    worker_command,
)
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.launch import LAUNCH, checkout

PORT, HTTP_PORT = "50051", "8080"
LOOPBACK = "127.0.0.1"
FOR_CLIENTS = ("--http_port", HTTP_PORT, "--port", "0")  # as `serve` has them
URL = f"http://{LOOPBACK}:{HTTP_PORT}/v1"
OF_THE_COMPARISON = ("--host", "--port", "--prefix_sharing", "--rehearse")  # flags with values for measuring only
DEFAULTS = (["--backend", "torch"], ["--pipeline", "auto"], ["--draft", "auto"])
APART = f"On two machines, put the other's address in place of {LOOPBACK}, and secure both (docs/security.md)."


def served(found: Comparison, architecture: str) -> list[str]:
    """Returns the commands for here; none for a rehearsal, and for a server that ran already."""
    ran = any(e.architecture.name == architecture and e.log is None for e in found.endpoints)
    return [] if ran or found.rehearsed else serving(found.config, architecture, checkout())


def serving(config: ComparisonConfig, architecture: str, root: Path | None) -> list[str]:
    """Returns command lines in starting order; the last serves OpenAI clients at URL. `root`: the checkout, if any."""
    length = ["--speculation_length", "auto" if config.speculation_length is None else str(config.speculation_length)]
    at = f"{LOOPBACK}:{PORT}"
    if architecture in arch.PLAIN:
        commands = [target_command(config)]
    elif architecture in (arch.FUSED.name, arch.LOOKUP.name):
        commands = [[*beside_command(config, architecture), *length]]
    elif architecture == arch.REMOTE_DRAFT.name:
        commands = [proposing_command(config), asking_command(config, at, *length)]
    else:
        commands = [target_command(config, (architecture,)), worker_command(config, architecture, at, *length)]
    *first, last = map(_kept, commands)
    return [*(_line([*each, "--port", PORT], root) for each in first), _line([*last, *FOR_CLIENTS], root)]


def _kept(command: list[str]) -> list[str]:
    """Returns a server's role and flags, without those for measuring only."""
    (_, role, *flags), kept = command[len(LAUNCH) :], list[str]()
    while flags:
        flag = flags.pop(0)
        values = [flags.pop(0)] if flags and not flags[0].startswith("--") else []
        kept += [flag, *values] if flag not in OF_THE_COMPARISON and [flag, *values] not in DEFAULTS else []
    return [role, *kept]


def _line(command: list[str], root: Path | None) -> str:
    """Returns a role's command line; `serve` in place of a fused target with the flags that it implies."""
    role, *flags = command
    if role == "fused_target":
        role, flags = "serve", flags[: -len(FOR_CLIENTS)]
    if root is None:
        return shlex.join(["tandem", role, *flags])
    if role == "serve":
        return f"make serve ARGS={shlex.quote(shlex.join(flags).replace('$', '$$'))}"
    python = os.path.relpath(sys.executable, root) if Path(sys.executable).is_relative_to(root) else sys.executable
    return shlex.join([python, "main.py", "--role", role, *flags])

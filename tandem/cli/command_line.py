"""Parses the roles' command line. Refuses a flag that would have no effect, and says which roles take it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tandem.cli.flag_row import ASKING, BACKENDS, GATEWAY, LISTENING, PROMPTED, SERVERS, Flag
from tandem.cli.flags import CALLING, FLAGS, GROUPS
from tandem.speculation.types import SAMPLING_FIELDS

_PROPOSING = "--propose_only has no target and does not answer Generate"
_HOSTS = "--target_host already has the port"


class RoleParser(argparse.ArgumentParser):
    """Builds the parser; `roles` and `commands` map each name to its help text.

    Parses into a namespace that has every flag of the table, and `argv`, the arguments that were parsed. Each flag has
    two spellings, --top_p and --top-p. After --role, --help shows only the flags that the role takes.
    """

    def __init__(self, roles: Mapping[str, str], program: str, commands: Mapping[str, str]) -> None:
        command = f"{program} ROLE" if program != "main.py" else "main.py --role ROLE"
        super().__init__(
            prog=program,
            usage=f"{command} [flags]",
            description="Speculative decoding over gRPC: servers, clients, and single models.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"roles ({command} --help shows the flags of one role):\n"
            + "\n".join(f"  {name:14} {text}" for name, text in {**roles, **commands}.items()),
            allow_abbrev=False,
        )
        role_help = "the role to run; the list is below"
        self.add_argument("--role", required=True, choices=list(roles), metavar="ROLE", help=role_help)
        for group in GROUPS:
            titled = self.add_argument_group(group.title)
            for flag in group.flags:
                options = {**flag.options, "default": argparse.SUPPRESS}  # tells given flags from defaults
                titled.add_argument(*_spellings(flag), dest=flag.name, **options)

    # argparse overloads this method for callers that pass a namespace; no caller here does.
    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parses `args`. Raises ValueError for a flag that the role, or its backend, would not use."""
        argv = tuple(sys.argv[1:] if args is None else args)
        self._show_only(_role_in(argv))
        found = super().parse_args(argv)
        given = vars(found).keys() - {"role"}
        for name, flag in FLAGS.items():
            if name not in given:
                setattr(found, name, flag.default)
        found.argv = argv
        refuse(found, given)
        return found

    def _show_only(self, role: str | None) -> None:
        for action in self._actions:
            if role is not None and action.dest in FLAGS and role not in FLAGS[action.dest].roles:
                action.help = argparse.SUPPRESS

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _spellings(flag: Flag) -> list[str]:
    return list(dict.fromkeys(s for name in flag.names for s in (f"--{name}", f"--{name.replace('_', '-')}")))


def _role_in(argv: Sequence[str]) -> str | None:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--role")
    try:
        return str(first.parse_known_args(argv)[0].role)
    except argparse.ArgumentError:
        return None


@dataclass(frozen=True, slots=True)
class Requirement:
    """Flags that have an effect on `roles` only if `met` is true; `why` is the error message if it is not."""

    flags: tuple[str, ...]
    roles: tuple[str, ...]
    met: Callable[[argparse.Namespace], bool]
    why: str


NEEDS = (
    Requirement(("draft_seconds",), ("target",), lambda a: a.draft_host, "without --draft_host no server is called"),
    Requirement(
        CALLING,
        ("target",),
        lambda a: a.draft_host or a.prefill,
        "without --draft_host or --prefill no server is called",
    ),
    Requirement(CALLING, ("fused_target",), lambda a: a.prefill, "without --prefill no server is called"),
    Requirement(
        ("prefill_min_tokens", "prefill_timeout_s"),
        ("target", "fused_target"),
        lambda a: a.prefill,
        "without --prefill no server is called",
    ),
    Requirement(
        (
            *("target_host", "target_port", "connect_seconds", "reconnect_seconds", "pipeline", "queue", "profile"),
            *("max_requests_per_identity", "max_new_tokens", "engine_port", "draft_adapters"),
            *(*SAMPLING_FIELDS, *CALLING),
        ),
        ("draft_worker",),
        lambda a: not a.propose_only,
        _PROPOSING,
    ),
    Requirement(("target_port",), ("draft_worker",), lambda a: _wants_port(a.target_host), _HOSTS),
    Requirement(("port",), ASKING, lambda a: _wants_port(a.target_host), _HOSTS),
    Requirement(
        ("adapter_admins",),
        ("target", "fused_target"),
        lambda a: a.adapter_root is not None,
        "give --adapter_root as well",
    ),
    Requirement(("engine_host",), SERVERS, lambda a: a.engine_port is not None, "give --engine_port as well"),
    Requirement(("worker_flags",), (GATEWAY,), lambda a: a.workers is None, "with --workers it starts no server"),
    Requirement(
        ("metrics_host",), (*LISTENING, GATEWAY), lambda a: a.metrics_port is not None, "give --metrics_port as well"
    ),
    Requirement(
        ("target_model", "draft_model"), ("convert",), lambda a: a.convert == "eagle", "is for --convert eagle"
    ),
    Requirement(
        ("model",), ("convert",), lambda a: a.convert != "eagle", "--convert eagle takes --draft_model, the head"
    ),
    Requirement(("exact",), tuple(FLAGS["exact"].roles), lambda a: not a.fast, "cannot be combined with --fast"),
    Requirement(
        ("regex",), PROMPTED, lambda a: a.json_schema is None, "an output has one structure; leave json_schema out"
    ),
    Requirement(("chat",), ("accept",), lambda a: a.prompt or a.prompt_text, "is for your own prompts"),
    Requirement(
        ("modules_to_not_convert",),
        ("plan",),
        lambda a: a.quantization not in ("auto", "none"),
        "needs a --quantization other than auto and none",
    ),
    Requirement(
        ("target_model",),
        ("target", "verify_target", "fused_target", "accept", "compile", "plan"),
        lambda a: a.model is None,
        "the same as --model here; give one of them",
    ),
    Requirement(
        ("draft_model",), ("verify_draft",), lambda a: a.model is None, "the same as --model here; give one of them"
    ),
    Requirement(
        ("model",),
        ("draft", "draft_worker"),
        lambda a: a.target_model is None if a.draft == "ngram" else a.draft_model is None,
        "the same as --draft_model here (with --draft ngram, as --target_model); give one of them",
    ),
)


def refuse(args: argparse.Namespace, given: Collection[str]) -> None:
    """Raises ValueError for the first of the `given` flags that would have no effect."""
    for name in (name for name in FLAGS if name in given):
        flag = FLAGS[name]
        if args.role not in flag.roles:
            raise ValueError(f"{name}: --role {args.role} does not take it; these do: {', '.join(flag.roles)}")
        if args.role in FLAGS["backend"].roles and args.backend in BACKENDS:
            _refuse_backend(flag, args.role, args.backend)
    for need in NEEDS:
        for name in need.flags:
            if name in given and args.role in need.roles and not need.met(args):
                raise ValueError(f"{name}: {need.why}")


def _refuse_backend(flag: Flag, role: str, backend: str) -> None:
    if role in flag.takers(backend):
        return
    others = [other for other in BACKENDS if role in flag.takers(other)]
    who = f"--backend {' or '.join(others)} does"
    if roles := flag.takers(backend):
        who += f", and with {backend} these roles: {', '.join(roles)}"
    raise ValueError(f"{flag.name}: --role {role} with --backend {backend} does not take it; {who}")


def _wants_port(hosts: str) -> bool:
    """Returns whether one of the hosts has no port, or is a bare IPv6 address."""
    return any(
        ":" not in host.rpartition("]")[2] or (host.count(":") > 1 and not host.startswith("["))
        for host in map(str.strip, hosts.split(","))
    )

"""Parses the roles' command line; refuses flags without effect and names the roles that take them."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tandem
from tandem.cli.flags import COMMON, FLAGS, Options
from tandem.cli.option import Flag, OptionParser, spelled
from tandem.cli.roles import (
    APART,
    ASKING,
    BACKENDS,
    CALLING,
    COMMANDS,
    LISTENING,
    ROLES,
    SERVE,
    SERVE_FLAGS,
    SERVERS,
    TARGETS,
)
from tandem.hints import meant
from tandem.rpc.endpoint_pool import has_port
from tandem.speculation.types import SAMPLING_FIELDS

YES, NO = ("true", "yes", "on"), ("false", "no", "off")


class RoleParser(OptionParser[Options]):
    """--help shows the flags of --role; without a role, the roles."""

    def __init__(self, program: str = "main.py") -> None:
        command = f"{program} ROLE" if program != "main.py" else "main.py --role ROLE"
        texts = ROLES | COMMANDS
        super().__init__(
            Options,
            FLAGS,
            prog=program,
            usage=f"{command} [flags]",
            description="Speculative decoding over gRPC: servers, clients, and single models.",
            common=COMMON,
            epilog=f"roles ({command} --help shows the flags of one role):\n"
            + "\n".join(f"  {name:14} {text}" for name, text in texts.items()),
        )
        self.add_argument("--role", required=True, metavar="ROLE", help="the role to run; the list is below")
        file_help = "read flags from this YAML file (docs/running.md)"
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=file_help)
        self.add_argument("--version", action="version", version=f"tandem {tandem.__version__}")

    def parse_args(self, args: Sequence[str] | None = None) -> Options:  # type: ignore[override]
        """Raises ValueError for a flag that the role or its backend does not use."""
        argv = _served(with_config(sys.argv[1:] if args is None else args, FLAGS))
        role = _early(argv, "role", "ROLE")[0]
        if role is not None and role not in ROLES:
            known = ", ".join((*ROLES, *COMMANDS))
            hint = meant(role, (*ROLES, *COMMANDS))
            self.error(f"argument --role: invalid choice: {role!r}{hint} (choose from {known})")
        for action in self._actions:
            if action.dest in FLAGS and role not in FLAGS[action.dest].roles:
                action.help = argparse.SUPPRESS
        if not {"--role", "-h", "--help", "--version"} & {word.partition("=")[0] for word in argv}:
            self.print_help(sys.stderr)
            self.exit(2)
        found = super().parse_args(argv)
        refuse(found)
        return found


def _served(argv: Sequence[str]) -> tuple[str, ...]:
    """Replaces `--role serve` by SERVE_FLAGS, before all other flags."""
    for i, pair in enumerate(itertools.pairwise(argv)):
        if pair == ("--role", SERVE):
            return (*SERVE_FLAGS, *argv[:i], *argv[i + 2 :])
    return tuple(argv)


def _early(argv: Sequence[str], name: str, metavar: str) -> tuple[str | None, list[str]]:
    """Returns a flag's value, or None, and the other arguments. Raises ValueError for a flag without a value."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument(f"--{name}", dest="value")
    try:
        found, rest = first.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{name}: give --{name} {metavar}") from error
    return found.value, rest


SECURING = tuple(name for name, flag in FLAGS.items() if flag.roles == CALLING)
PROPOSING = (
    *("target_host", "target_port", "connect_seconds", "reconnect_seconds", "pipeline", "queue", "profile"),
    *("max_requests_per_identity", "max_new_tokens", "http_port", "draft_adapters"),
    *(*SAMPLING_FIELDS, *SECURING),
)
PREFILLING = ("prefill_min_tokens", "prefill_timeout_s")
SERVING_HTTP = ("http_host", "allowed_hosts")


def without_effect(args: Options) -> Iterator[tuple[tuple[str, ...], str]]:
    """Flags that others make ineffective, and why."""
    role = args.role
    if role == "target" and not args.draft_host:
        yield ("draft_seconds",), "without --draft_host no server is called"
    if role in TARGETS and not args.prefill:
        yield PREFILLING, "without --prefill no server is called"
        if role == "fused_target" and not args.settle:
            yield SECURING, "without --prefill or --settle no server is called"
        elif not args.draft_host and not args.settle:
            yield SECURING, "without --draft_host, --prefill or --settle no server is called"
    if role == "draft_worker" and args.propose_only:
        yield PROPOSING, "--propose_only has no target and does not answer Generate"
    if role in (*ASKING, "draft_worker") and not _wants_port(args.target_host):
        yield ("target_port" if role == "draft_worker" else "port",), "--target_host already has the port"
    if role in SERVERS and args.http_port is None:
        yield SERVING_HTTP, "give --http_port as well"
    if role in LISTENING and args.metrics_port is None:
        yield ("metrics_host",), "give --metrics_port as well"
    if role == "convert" and args.convert != "eagle":
        yield ("target_model", "draft_model"), "is for --convert eagle"
    if role == "convert" and args.convert == "eagle":
        yield ("model",), "--convert eagle takes --draft_model, the head"
    if role == "plan" and args.quantization in ("auto", "none"):
        yield ("modules_to_not_convert",), "needs a --quantization other than auto and none"
    if role in (*TARGETS, "verify_target", "compile", "plan") and args.model is not None:
        yield ("target_model",), "the same as --model here; give one of them"
    if role == "verify_draft" and args.model is not None:
        yield ("draft_model",), "the same as --model here; give one of them"
    if role in APART and (args.target_model if args.draft == "ngram" else args.draft_model) is not None:
        yield ("model",), "the same as --draft_model here (with --draft ngram, as --target_model); give one of them"


def refuse(args: Options) -> None:
    """Raises ValueError for the first given flag without effect."""
    for name, flag in FLAGS.items():
        if name not in args.given:
            continue
        if args.role not in flag.roles:
            raise ValueError(f"{name}: --role {args.role} does not take it; these do: {', '.join(flag.roles)}")
        if args.role in FLAGS["backend"].roles and args.backend in BACKENDS:
            _refuse_backend(flag, args.role, args.backend)
    for names, why in without_effect(args):
        for name in (each for each in names if each in args.given):
            raise ValueError(f"{name}: {why}")


def _refuse_backend(flag: Flag, role: str, backend: str) -> None:
    if role in flag.takers(backend):
        return
    others = [other for other in BACKENDS if role in flag.takers(other)]
    who = f"--backend {' or '.join(others)} does"
    if roles := flag.takers(backend):
        who += f", and with {backend} these roles: {', '.join(roles)}"
    raise ValueError(f"{flag.name}: --role {role} with --backend {backend} does not take it; {who}")


def _wants_port(hosts: str) -> bool:
    """Whether a host has no port, or has a scheme, which is refused later."""
    return any("://" in host or not has_port(host) for host in map(str.strip, hosts.split(",")))


def with_config(argv: Sequence[str], flags: Mapping[str, Flag]) -> tuple[str, ...]:
    """Puts the flags of --config before the other arguments. Raises ValueError."""
    config, rest = _early(argv, "config", "FILE")
    if config is None:
        return tuple(argv)
    path = Path(config)
    names = {spelling: name for name, flag in flags.items() for spelling in flag.spellings()} | {"--role": "role"}
    given = {names.get(spelled(word).partition("=")[0]) for word in rest}
    words: list[str] = []
    for key, value in _settings(path).items():
        if (name := names.get(spelled(f"--{key}"))) is None:
            raise ValueError(f"config: {path}: no flag is called {key!r}{meant(key, names.values())}")
        if name not in given:
            words += _words(name, flags[name].kind if name in flags else "str", value, path)
    return (*words, *rest)


def _settings(path: Path) -> dict[str, object]:
    import yaml

    try:
        # Every value as it is written: YAML takes `off` and `on`, which some flags have as values, for booleans.
        read = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ValueError(f"config: {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config: {path}: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"config: {path}: it must have lines `flag: value`")
    return {str(key): value for key, value in read.items()}


def _words(name: str, kind: str, value: object, path: Path) -> list[str]:
    given = value if isinstance(value, list) else [value]
    values = [each for each in given if isinstance(each, str)]
    if len(values) < len(given):
        raise ValueError(f"config: {path}: {name}: not the value of a flag; JSON stands in quotes, as one string")
    if kind == "bool":
        if value not in (*YES, *NO):
            raise ValueError(f"config: {path}: {name}: {value!r} is neither true nor false")
        return [f"--{name}"] if value in YES else []
    return [f"--{name}={each}" for each in (values if kind.startswith("tuple[") else [",".join(values)])]

"""Runs a role: `tandem ROLE`, `tandem --role ROLE` or `python main.py --role ROLE`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from tandem.cli.command_line import RoleParser
from tandem.cli.role_names import SERVE
from tandem.cli.roles import COMMANDS, COMPARE, COMPLETION, ROLES
from tandem.hints import hinted
from tandem.installing import install_command, missing_package
from tandem.rpc.logs import set_up
from tandem.rpc.printable import printable

EXTRAS = {
    "serve": ("gguf", "huggingface_hub", "safetensors", "tokenizers"),
    "torch": ("accelerate", "torch", "transformers"),
    "config": ("yaml",),
    "comparison": ("jinja2", "matplotlib", "rich"),
    "http": ("h11", "uvicorn"),
    "metrics": ("prometheus_client",),
    "mtls": ("cryptography",),
    "ray": ("ray",),
}
"""Libraries by extra."""


def parser(program: str = "main.py") -> RoleParser:
    """`program`: the name in help and errors."""
    return RoleParser({name: role.help for name, role in ROLES.items()}, program, COMMANDS)


def console() -> int:
    """The console command `tandem`."""
    return main(program="tandem")


def main(argv: Sequence[str] | None = None, program: str = "main.py") -> int:
    """Runs a role. Exit codes: 0 done, 1 failed, 2 cannot start (one line on stderr)."""
    debug = False
    arguments = with_role(sys.argv[1:] if argv is None else argv)
    if arguments[:2] == ["--role", COMPARE]:
        return _compare(arguments[2:], program)
    if arguments[:2] == ["--role", COMPLETION]:
        return _complete(arguments[2:], program)
    try:
        args = parser(program).parse_args(arguments)
        debug = args.debug
        if not debug:
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's core writes its own lines to stderr
        set_up(args.log_format, debug, _rank())
        if args.role != "doctor":
            _require_libraries()
        return asyncio.run(ROLES[args.role].start(args)) or 0
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        return _refuse(str(error), error, 2, debug, program)
    except ModuleNotFoundError as error:
        if (missing := _missing(error)) is None:
            raise
        return _refuse(missing, error, 2, debug, program)
    except RuntimeError as error:
        if "home directory" not in str(error):  # pathlib's, of a path with ~
            raise
        return _refuse("HOME: not set, and this user has no account: name paths without ~", error, 2, debug, program)
    except Exception as error:
        if type(error).__name__ != "TandemError":
            raise
        return _refuse(str(error), error, 1, debug, program)


def _require_libraries() -> None:
    """Raises ValueError if gRPC or protobuf is too old or too new for the stubs."""
    from tandem.host.packages import clashes, refusal

    if clash := refusal(clashes()):
        raise ValueError(f"{clash}; python main.py --role doctor says more")


def with_role(argv: Sequence[str]) -> list[str]:
    """Returns `target ...` as `--role target ...`, `serve MODEL ...` as `--role serve --model MODEL ...`,
    and `check RECEIPT ...` with --receipt.
    """
    words = ["--role", *argv] if argv and not argv[0].startswith("-") else list(argv)
    flag = {SERVE: "--model", "check": "--receipt"}.get(words[1]) if words[:1] == ["--role"] and words[1:] else None
    given = [flag] if flag and words[2:] and not words[2].startswith("-") else []
    return [*words[:2], *given, *words[2:]]


def _complete(argv: Sequence[str], program: str) -> int:
    from tandem.cli.completion import script

    try:
        print(script(" ".join(argv)), end="")
    except ValueError as error:
        return _refuse(str(error), error, 2, False, program)
    return 0


def _compare(argv: list[str], program: str) -> int:
    from tandem.cli.compare import main as compare

    command = "compare_architectures.py" if program == "main.py" else f"{program} {COMPARE}"
    try:
        return compare(argv, command)
    except ModuleNotFoundError as error:
        if (missing := _missing(error)) is None:
            raise
        return _refuse(missing, error, 2, False, command)


def _missing(error: ModuleNotFoundError) -> str | None:
    """The install hint for a missing library; None if no extra has it."""
    if package := missing_package(error.name):
        return package
    library = (error.name or "").partition(".")[0]
    extra = next((extra for extra, libraries in EXTRAS.items() if library in libraries), None)
    return extra and f"{library} is not installed; {install_command(extra)}"


def _rank() -> int:
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0


def _refuse(message: str, error: Exception, code: int, debug: bool, program: str) -> int:
    if debug:
        logging.getLogger("tandem").debug("failed", exc_info=error)
    label = f"[rank {_rank()}] " if _rank() else ""
    print(f"{program}: {label}{printable(hinted(' '.join(message.split())), None)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Runs a role: `tandem ROLE`, `tandem --role ROLE` or `python main.py --role ROLE`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from tandem.cli.command_line import RoleParser
from tandem.cli.roles import COMPARE, SERVE, start
from tandem.hints import hinted
from tandem.installing import install_command
from tandem.rpc.logs import printable, set_up
from tandem.speculation.errors import TandemError

EXTRAS = {  # libraries by extra
    "serve": ("gguf", "huggingface_hub", "safetensors", "tokenizers"),
    "torch": ("accelerate", "torch", "transformers"),
    "config": ("yaml",),
    "comparison": ("jinja2", "rich"),
    "http": ("h11", "uvicorn"),
    "metrics": ("prometheus_client",),
    "mtls": ("cryptography",),
    "ray": ("ray",),
}


def console() -> int:
    return main(program="tandem")


def main(argv: Sequence[str] | None = None, program: str = "main.py") -> int:
    """Runs a role. Exit codes: 0 done, 1 failed, 2 cannot start (one line on stderr)."""
    debug = False
    arguments = with_role(sys.argv[1:] if argv is None else argv)
    if comparing := arguments[:2] == ["--role", COMPARE]:
        program = "compare_architectures.py" if program == "main.py" else f"{program} {COMPARE}"
    try:
        if comparing:
            from tandem.cli.compare import main as compare

            return compare(arguments[2:], program)
        args = RoleParser(program).parse_args(arguments)
        debug = args.debug
        if not debug:
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's core writes its own lines to stderr
        set_up(args.log_format, debug, _rank())
        if args.role != "doctor":
            _require_libraries()
        return asyncio.run(start(args)) or 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message, code = _reason(error)
        if not message or (comparing and not isinstance(error, ModuleNotFoundError)):
            raise
        return _refuse(message, error, code, debug, program)


def _reason(error: Exception) -> tuple[str, int]:
    """Returns the line that explains an error, and the exit code; "" for a defect."""
    if isinstance(error, ValueError):
        return str(error) or repr(error), 2
    if isinstance(error, TandemError):
        return str(error), 1
    if isinstance(error, ModuleNotFoundError):
        return _missing(error) or "", 2
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib's, of a path with ~
        return "HOME: not set, and this user has no account: name paths without ~", 2
    return "", 2


def _require_libraries() -> None:
    """Raises ValueError if gRPC or protobuf is too old or too new for the stubs."""
    from tandem.host.packages import clashes, refusal

    if clash := refusal(clashes()):
        raise ValueError(f"{clash}; python main.py --role doctor says more")


def with_role(argv: Sequence[str]) -> list[str]:
    """Returns `target ...` as `--role target ...`, `serve MODEL ...` as `--role serve --model MODEL ...`,
    `check RECEIPT ...` with --receipt and `settle INPUT ...` with --input.
    """
    words = ["--role", *argv] if argv and not argv[0].startswith("-") else list(argv)
    firsts = {SERVE: "--model", "check": "--receipt", "settle": "--input"}
    flag = firsts.get(words[1]) if words[:1] == ["--role"] and words[1:] else None
    given = [flag] if flag and words[2:] and not words[2].startswith("-") else []
    return [*words[:2], *given, *words[2:]]


def _missing(error: ModuleNotFoundError) -> str | None:
    """The install hint for a missing library; None if no extra has it."""
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

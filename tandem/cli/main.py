"""Launches a role: python main.py --role ROLE."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tandem.cli.command_line import RoleParser
from tandem.cli.configuration import (
    accept_config,
    advice_config,
    client_config,
    compile_config,
    model_config,
    pipeline_of,
    plan_config,
    role_config,
)
from tandem.rpc.logs import set_up
from tandem.rpc.printable import printable

Run = Coroutine[Any, Any, Any]


def serve(args: argparse.Namespace, *host: Any) -> Run:
    """Runs a server role; `host` replaces our own gRPC server."""
    from tandem.services.launch import run_role

    model = args.target_model or args.model
    if args.role == "target":
        model = args.model or args.target_model
    if args.role == "draft_worker":
        args.draft_model = args.draft_model or _own_draft(args)
    return run_role(args.role, role_config(args, model), *host)


def _draft(args: argparse.Namespace) -> Run:
    from tandem.clients.local import run_draft

    args.draft_model = args.draft_model or _own_draft(args)
    models = model_config(args, args.target_model or args.model)
    return run_draft(client_config(args), models, args.connect_seconds, pipeline_of(args))


def _own_draft(args: argparse.Namespace) -> str | None:
    """A draft role's --model is its draft, unless n-gram lookup drafts: then only its tokenizer is used."""
    return None if args.draft == "ngram" else args.model


def _client(args: argparse.Namespace) -> Run:
    from tandem.clients.terminal import run_client

    return run_client(client_config(args), args.service)


def _fused_client(args: argparse.Namespace) -> Run:
    from tandem.clients.terminal import run_client
    from tandem.rpc.channel import FUSED

    return run_client(client_config(args), FUSED)


def _verify_target(args: argparse.Namespace) -> Run:
    from tandem.clients.local import run_alone

    return run_alone(client_config(args), model_config(args, args.model or args.target_model), "target_only")


def _verify_draft(args: argparse.Namespace) -> Run:
    from tandem.checkpoints.locate import embedded_draft
    from tandem.clients.local import run_alone

    model = args.model or args.draft_model or embedded_draft()
    if model is None:
        raise ValueError("model: no draft model is shipped; name one with --model")
    return run_alone(client_config(args), model_config(args, model), "draft_only")


def _accept(args: argparse.Namespace) -> Run:
    from tandem.training.acceptance.run import run_accept

    return run_accept(accept_config(args), Path(args.output) if args.output else None)


def _compile(args: argparse.Namespace) -> Run:
    from tandem.engine.compile_ahead import run_compile

    return _at_once(run_compile, compile_config(args))


def _advise(args: argparse.Namespace) -> Run:
    from tandem.comparison.analysis.advice import run_advice

    return _at_once(run_advice, advice_config(args))


def _plan(args: argparse.Namespace) -> Run:
    from tandem.planning.plan import run_plan

    return _at_once(run_plan, plan_config(args), args.json)


def _doctor(args: argparse.Namespace) -> Run:
    from tandem.planning.doctor import run_doctor

    return _at_once(run_doctor, args.json)


async def _at_once(role: Callable[..., int], *config: object) -> int:
    """A role that waits for nothing, as a coroutine like the others."""
    return role(*config)


ROLES: dict[str, tuple[Callable[[argparse.Namespace], Run], str]] = {
    "target": (
        serve,
        "server: TargetVerifier, verifies drafts; decodes plainly, or with drafts from --draft_host",
    ),
    "fused_target": (serve, "server: FusedSpeculativeServer, draft and target side by side"),
    "draft_worker": (serve, "server: DraftWorker, drafts here and verifies at --target_host, or for who asks"),
    "client": (_client, "asks any of the three servers"),
    "fused_client": (_fused_client, "asks a FusedSpeculativeServer"),
    "draft": (_draft, "drafts here for its own prompts and verifies at --target_host"),
    "verify_target": (_verify_target, "runs the target alone, without a server, token by token"),
    "accept": (_accept, "measures a draft against a target: acceptance, costs, best speculation length"),
    "compile": (_compile, "makes the graphs of target, draft and both beforehand, into a folder that servers share"),
    "advise": (_advise, "from a comparison.json: which architecture, which length, for which link and load"),
    "plan": (_plan, "from config.json files: what fits on a Trainium or Inferentia instance, before compiling"),
    "doctor": (_doctor, "what this machine has, where models can run on it, and what to do next"),
    "verify_draft": (_verify_draft, "runs the draft alone, without a server, token by token"),
}


def parser() -> RoleParser:
    """Of the command line."""
    return RoleParser({name: text for name, (_, text) in ROLES.items()})


def main(argv: list[str] | None = None) -> int:
    """Runs a role. Exit codes: 0 done, 1 failed, 2 cannot start (one line on stderr says why)."""
    debug = False
    try:
        args = parser().parse_args(argv)
        debug = args.debug
        if not debug:
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's core writes lines of its own to stderr
        set_up(args.log_format, debug, _rank())
        return asyncio.run(ROLES[args.role][0](args)) or 0
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        return _refuse(error, 2, debug)
    except Exception as error:
        if type(error).__name__ != "TandemError":
            raise
        return _refuse(error, 1, debug)


def _rank() -> int:
    """This process's, among those that share a target."""
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0


def _refuse(error: Exception, code: int, debug: bool) -> int:
    if debug:
        logging.getLogger("tandem").debug("cannot go on", exc_info=error)
    label = f"[rank {_rank()}] " if _rank() else ""
    print(f"main.py: {label}{printable(' '.join(str(error).split()), None)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

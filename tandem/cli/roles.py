"""The table of roles: their names, what they do, and how each one starts from the parsed command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from tandem.cli.configuration import (
    accept_config,
    advice_config,
    client_config,
    compile_config,
    convert_config,
    gateway_config,
    model_config,
    pipeline_of,
    plan_config,
    role_config,
)

Run = Coroutine[Any, Any, Any]


class Role(NamedTuple):
    """`start` builds the role's coroutine, which returns the exit code (None: 0)."""

    start: Callable[[argparse.Namespace], Run]
    help: str


def serve(args: argparse.Namespace, *host: Any) -> Run:
    """Runs a server role; `host` replaces our own gRPC server (tandem/ray_serve/replica.py)."""
    from tandem.services.launch import run_role

    model = args.target_model or args.model
    if args.role == "target":
        model = args.model or args.target_model
    if args.role == "draft_worker":
        args.draft_model = args.draft_model or _own_draft(args)
    return run_role(args.role, role_config(args, model), *host)


def _gateway(args: argparse.Namespace) -> Run:
    from tandem.services.gateway.run import run_gateway

    return run_gateway(gateway_config(args))


def _draft(args: argparse.Namespace) -> Run:
    from tandem.clients.local import run_draft

    args.draft_model = args.draft_model or _own_draft(args)
    models = model_config(args, args.target_model or args.model)
    return run_draft(client_config(args), models, args.connect_seconds, pipeline_of(args))


def _own_draft(args: argparse.Namespace) -> str | None:
    """A draft role's --model is its draft model. With n-gram lookup it is the target, whose tokenizer is used."""
    return None if args.draft == "ngram" else args.model


def _client(args: argparse.Namespace) -> Run:
    from tandem.clients.terminal import run_client

    return run_client(client_config(args), args.service)


def _fused_client(args: argparse.Namespace) -> Run:
    from tandem.clients.terminal import run_client
    from tandem.rpc.channel import FUSED

    return run_client(client_config(args), FUSED)


def _verify_target(args: argparse.Namespace) -> Run:
    from tandem.clients.local import run_single_model

    return run_single_model(client_config(args), model_config(args, args.model or args.target_model), "target_only")


def _verify_draft(args: argparse.Namespace) -> Run:
    from tandem.checkpoints.locate import embedded_draft
    from tandem.clients.local import run_single_model

    model = args.model or args.draft_model or embedded_draft()
    if model is None:
        raise ValueError("model: no draft model is shipped; name one with --model")
    return run_single_model(client_config(args), model_config(args, model), "draft_only")


def _accept(args: argparse.Namespace) -> Run:
    from tandem.training.acceptance.run import run_accept

    return run_accept(accept_config(args), Path(args.output) if args.output else None)


def _compile(args: argparse.Namespace) -> Run:
    from tandem.engine.compile_ahead import run_compile

    return _at_once(run_compile, compile_config(args))


def _convert(args: argparse.Namespace) -> Run:
    from tandem.checkpoints.convert import run_convert

    return _at_once(run_convert, convert_config(args))


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
    """Wraps a role that awaits nothing in a coroutine."""
    return role(*config)


ROLES = {
    "target": Role(serve, "server: TargetVerifier, verifies drafts; decodes plainly, or with drafts from --draft_host"),
    "fused_target": Role(serve, "server: FusedSpeculativeServer, draft and target side by side"),
    "draft_worker": Role(
        serve, "server: DraftWorker, drafts and verifies at --target_host, or drafts for targets that ask it"
    ),
    "prefill": Role(serve, "server: PrefillWorker, computes long prompts for targets started with --prefill"),
    "gateway": Role(_gateway, "HTTP for OpenAI clients, by smg, in front of servers with an --engine_port"),
    "client": Role(_client, "asks any of the three servers"),
    "fused_client": Role(_fused_client, "asks a FusedSpeculativeServer"),
    "draft": Role(_draft, "drafts for its own prompts and verifies at --target_host"),
    "verify_target": Role(_verify_target, "runs the target alone, without a server, token by token"),
    "verify_draft": Role(_verify_draft, "runs the draft alone, without a server, token by token"),
    "accept": Role(_accept, "measures a draft against a target: acceptance, costs, best speculation length"),
    "compile": Role(_compile, "compiles the graphs of target, draft and both ahead of time, for servers to share"),
    "convert": Role(_convert, "converts a checkpoint for NxD Inference: FP8 range, EAGLE heads, safetensors"),
    "advise": Role(_advise, "recommends an architecture and a length for a link and a load, from a comparison.json"),
    "plan": Role(_plan, "computes from config.json files what fits on a Trainium or Inferentia instance"),
    "doctor": Role(_doctor, "reports what this machine has, where models can run on it, and what to do next"),
}
COMPARE = "compare"
"""Not a role: a command with flags of its own."""
COMPARE_HELP = "compares the architectures on the same prompts; see compare --help"

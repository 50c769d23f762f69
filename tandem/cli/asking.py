"""Builds requests, addresses, clients and local models for a role's own prompts."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tandem.cli.flags import Options
from tandem.cli.option import auto_or_count, built, credentials, with_default_ports
from tandem.clients.messages import read_chat, read_prompts
from tandem.clients.terminal import ClientConfig, run_client
from tandem.installing import install_command
from tandem.rpc.channel import FUSED
from tandem.speculation.request import members
from tandem.speculation.sampling import member_named
from tandem.speculation.types import SAMPLING_FIELDS, GenerationRequest, SamplingParams
from tandem.speculation.verification_mode import Pipeline

Run = Coroutine[Any, Any, int]


def client(args: Options) -> Run:
    return run_client(client_config(args), args.service)


def fused_client(args: Options) -> Run:
    return run_client(client_config(args), FUSED)


def draft(args: Options) -> Run:
    from tandem.cli.models import model_config
    from tandem.clients.distributed import TARGET_SECONDS
    from tandem.clients.local import run_draft

    models = model_config(args.with_own_draft(), args.target_model or args.model)
    wait = TARGET_SECONDS if args.connect_seconds is None else args.connect_seconds
    return run_draft(client_config(args), models, wait, member_named(Pipeline, "pipeline", args.pipeline))


def verify_target(args: Options) -> Run:
    return _alone(args, args.model or args.target_model, "target_only")


def verify_draft(args: Options) -> Run:
    from tandem.checkpoints.locate import embedded_draft

    model = args.model or args.draft_model or embedded_draft()
    if model is None:
        raise ValueError(f"model: Tandem's own draft is not installed: {install_command('weights')}, or --model")
    return _alone(args, model, "draft_only")


def _alone(args: Options, model: str | None, name: str) -> Run:
    from tandem.cli.models import model_config
    from tandem.clients.local import run_single_model

    return run_single_model(client_config(args), model_config(args, model), name)


def client_config(args: Options) -> ClientConfig:
    prompts = (*args.prompt, *_file_prompts(args.prompt_text))
    chat = None if args.messages is None else read_chat(args.messages)
    if chat is not None and prompts:
        raise ValueError("messages: a chat is a prompt of its own; leave --prompt and --prompt_text out")
    if chat is None and not prompts:
        raise ValueError("prompt: give --prompt TEXT, --prompt_text FILE or --messages FILE")
    request = built(
        GenerationRequest,
        args,
        text="" if chat is None else None,
        messages=chat,
        sampling=sampling(args),
        unset_sampling=frozenset(name for name in SAMPLING_FIELDS if getattr(args, name) is None),
        max_total_tokens=args.sequence_length,
        speculation_length=auto_or_count("speculation_length", args.speculation_length),
        stop_strings=args.stop,
        ignore_end_of_sequence=args.ignore_eos,
        receipt=args.receipts is not None,
        **members(vars(args)),
    )
    return built(
        ClientConfig,
        args,
        address=with_default_ports(args.target_host, args.port),
        prompts=prompts or ("",),
        request=request,
        credentials=credentials(args),
    )


def sampling(args: Options) -> SamplingParams:
    """The sampling options, with defaults for the rest. Raises ValueError."""
    return built(SamplingParams, args)


def _file_prompts(file: str | None) -> tuple[str, ...]:
    try:
        return tuple(text for _, text in read_prompts(Path(file))) if file is not None else ()
    except ValueError as error:
        raise ValueError(f"prompt_text: {error}") from None

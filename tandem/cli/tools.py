"""Configures and starts roles that neither serve nor send prompts. Each imports only its own needs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.flags import Options
from tandem.cli.option import built, credentials, split_list

if TYPE_CHECKING:
    from tandem.engine.model_config import ModelConfig
    from tandem.workshops.planning.plan import PlanConfig

Run = Coroutine[Any, Any, Any]


async def _at_once(role: Callable[..., int], *config: object) -> int:
    return role(*config)


def compile_config(args: Options) -> tuple[ModelConfig, tuple[str, ...], tuple[str, ...]]:
    """The arguments of run_compile."""
    from tandem.cli.models import command, model_config
    from tandem.engine.compile_ahead import checked_parts

    models = model_config(args, args.target_model or args.model)
    return models, checked_parts(split_list(args.compile_for), models), command(args)


def compile(args: Options) -> Run:
    from tandem.engine.compile_ahead import run_compile

    return _at_once(run_compile, *compile_config(args))


def convert(args: Options) -> Run:
    from tandem.checkpoints.convert import run_convert

    flag = "draft_model" if args.convert == "eagle" else "model"
    source = getattr(args, flag)
    if source is None:
        raise ValueError(f"{flag}: give --{flag} DIR")
    if args.output is None:
        raise ValueError("output: give --output DIR, the folder to write to")
    target = Path(args.target_model) if args.target_model else None
    most = int(args.shard_gb * 10**9)
    return _at_once(run_convert, Path(source), Path(args.output), args.convert or "", target, most)


def advise(args: Options) -> Run:
    from tandem.comparison.report.printed import run_advice

    if args.report is None:
        raise ValueError("report: give --report comparison.json, which compare_architectures.py writes")
    return _at_once(run_advice, Path(args.report), args.rtt_ms, args.clients)


def plan_config(args: Options) -> PlanConfig:
    """A tp_degree of 1, the default, means all degrees."""
    from tandem.host.instances import INSTANCES
    from tandem.workshops.planning.plan import PlanConfig

    if args.instance is None:
        raise ValueError(f"instance: give --instance, one of {', '.join(INSTANCES)}")
    if (args.target_model or args.model) is None:
        raise ValueError("target_model: give --target_model DIR, a folder with a config.json")
    return built(
        PlanConfig,
        args,
        target_model=args.target_model or args.model,
        keep=split_list(args.modules_to_not_convert),
        length=args.length,
        drafts=args.most_drafts,
        degree=args.tp_degree if args.tp_degree > 1 else None,
        chunk=args.prefill_chunk or 64,
    )


def check(args: Options) -> Run:
    from tandem.cli.models import model_config
    from tandem.receipts.check_command import CheckConfig, run_check

    if args.receipt is None:
        raise ValueError("receipt: give the receipt's file, as in check RECEIPT --prompt FILE")
    if len(args.prompt) > 1:
        raise ValueError(f"prompt: a receipt is of one prompt, and {len(args.prompt)} files are given")
    config = built(
        CheckConfig,
        args,
        receipt=Path(args.receipt),
        **{"prompt": None, "chat": None, **(_prompt_file(Path(args.prompt[0])) if args.prompt else {})},
        models=model_config(args, args.model),
        keys=Path(args.keys) if args.keys else None,
        computation_receipt=Path(args.computation_receipt) if args.computation_receipt else None,
        own_length=args.sequence_length is None,
        own_format=args.backend == "torch" and not args.given & {"dtype", "weights"},
    )
    return run_check(config)


def _prompt_file(path: Path) -> dict[str, Any]:
    """Reads JSON token ids, a JSON chat, or text: the fields of a CheckConfig. Raises ValueError."""
    import json

    from tandem.clients.messages import chat_of
    from tandem.receipts.check_command import read_file

    text = read_file("prompt", path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and found and all(type(each) is int and 0 <= each < 2**32 for each in found):
        return {"prompt": tuple(found)}
    if isinstance(found, list) and found and all(isinstance(each, dict) for each in found):
        return {"chat": chat_of(found)}
    return {"prompt": text}


async def settle(args: Options) -> int:
    from tandem.cli.configuration import request_defaults
    from tandem.cli.models import model_config
    from tandem.clients.other_engine import OtherEngine
    from tandem.comparison.measuring.progress import Progress
    from tandem.services.settle_file import settle_file
    from tandem.services.settling import settler

    if args.input is None or args.settle is None or args.output is None:
        raise ValueError("input: give settle INPUT --engine openai=URL --output FILE")
    defaults = request_defaults(args)
    defaults = replace(defaults, sources={"seed": "--seed", **defaults.sources})  # two runs draw the same tokens
    engine = OtherEngine("engine", args.settle, credentials(args), args.reconnect_seconds)
    keys = Path(args.receipt_keys or f"{args.output}.keys")
    target = settler(model_config(args, args.model), engine, keys, defaults)
    with Progress() as bar:
        return await settle_file(Path(args.input), Path(args.output), target, bar.reached)


def plan(args: Options) -> Run:
    from tandem.workshops.planning.plan import run_plan

    return _at_once(run_plan, plan_config(args), args.json)


def doctor(args: Options) -> Run:
    if args.log is not None:
        from tandem.workshops.planning.known_errors import run_log

        return _at_once(run_log, Path(args.log), args.json)
    from tandem.workshops.planning.doctor import run_doctor

    return _at_once(run_doctor, args.json)

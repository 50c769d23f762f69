"""From the command line to configurations, validated. Nothing heavy is imported before it is known to be needed."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.launch import LAUNCH

if TYPE_CHECKING:
    from tandem.clients.terminal import ClientConfig
    from tandem.comparison.analysis.advice import AdviceConfig
    from tandem.engine.compile_ahead import CompileConfig
    from tandem.engine.loading import ModelConfig
    from tandem.planning.plan import PlanConfig
    from tandem.rpc.credentials import Credentials
    from tandem.runners.nxdi.settings import NxdiSettings
    from tandem.services.role_config import RoleConfig
    from tandem.services.security.config import Security
    from tandem.speculation.depth import Pipeline
    from tandem.speculation.types import SamplingParams
    from tandem.training.acceptance.measure import AcceptConfig

STARTED = time.monotonic()
CHUNK = 64  # tokens of a prompt per step, unless told
MOST = 5  # draft tokens per round that a server allows unless it is told


def model_config(args: argparse.Namespace, model: str | None) -> ModelConfig:
    """Which models, on what, in which shape."""
    from tandem.engine.loading import DraftChoice, ModelConfig
    from tandem.runners.loading import Execution, Shape
    from tandem.runners.torch.buckets import AskedBuckets

    nxdi = args.backend == "nxdi"  # which shares a model among cores itself
    k = speculation_length(args.speculation_length)
    return ModelConfig(
        execution=Execution(
            args.device,
            args.dtype,
            args.threads,
            args.compile,
            not args.fast,
            args.compiled_dir,
            args.cores,
            1 if nxdi else args.tp_degree,
        ),
        shape=Shape(
            args.batch,
            args.sequence_length or 512,
            most_drafts(args),
            CHUNK if args.prefill_chunk is None else args.prefill_chunk,
            AskedBuckets(numbers("batch_buckets", args.batch_buckets), numbers("draft_buckets", args.draft_buckets)),
        ),
        model=model,
        draft=DraftChoice(args.draft, args.draft_model),
        backend=args.backend,
        default_k=k,
        nxdi=nxdi_settings(args),
    )


def most_drafts(args: argparse.Namespace) -> int:
    """Draft tokens that a round may have. Raises ValueError."""
    k, most = speculation_length(args.speculation_length), args.max_speculation_length
    if most is None:
        return MOST if k is None else k
    if k is not None and k > most:
        raise ValueError(f"speculation_length: {k} is above max_speculation_length {most}")
    return int(most)


def nxdi_settings(args: argparse.Namespace) -> NxdiSettings:
    """What only --backend nxdi is told."""
    from tandem.runners.nxdi.settings import NxdiSettings, read_neuron_config

    return NxdiSettings(
        tp_degree=args.tp_degree,
        neuron_config=read_neuron_config(args.neuron_config),
        draft_neuron_config=read_neuron_config(args.draft_neuron_config, "draft_neuron_config"),
        compiled_dir=args.compiled_dir,
        eagle=args.eagle,
    )


def numbers(name: str, given: str | None) -> tuple[int, ...]:
    """1,2,4 as numbers. Raises ValueError."""
    try:
        return tuple(int(part) for part in (given or "").split(",") if part)
    except ValueError:
        raise ValueError(f"{name}: {given!r} is not numbers with commas between them, as in 1,4") from None


def speculation_length(given: str | None) -> int | None:
    """A number of draft tokens; None is auto. Raises ValueError."""
    if given is None or given == "auto":
        return None
    try:
        return int(given)
    except ValueError:
        raise ValueError(f"speculation_length: {given!r} is neither a number nor auto") from None


def role_config(args: argparse.Namespace, model: str | None) -> RoleConfig:
    """A server's whole configuration."""
    from tandem.engine.generator import RequestDefaults
    from tandem.engine.step_watch import named_seconds
    from tandem.runners.startup import Startup
    from tandem.services.observability.setup import ObservabilityConfig
    from tandem.services.role_config import RoleConfig
    from tandem.services.server import ServeConfig
    from tandem.services.shutdown import Ending

    startup = Startup(STARTED)
    startup.add("importing", startup.total())
    return RoleConfig(
        serve=ServeConfig(
            args.host,
            args.port,
            args.ready_file,
            args.drain_seconds,
            startup,
            security(args),
            args.health_port,
            Ending(),
        ),
        models=model_config(args, model),
        target_address=None if args.propose_only else addresses_of(args.target_host, args.target_port),
        draft_address=draft_address(args.draft_host),
        draft_seconds=args.draft_seconds,
        connect_seconds=args.connect_seconds,
        lease_seconds=args.lease_seconds,
        profile=args.profile,
        pipeline=pipeline_of(args),
        observability=ObservabilityConfig(args.metrics_port, args.metrics_host, args.otlp_endpoint),
        reconnect_seconds=args.reconnect_seconds,
        queue=args.queue,
        credentials=credentials(args),
        step_seconds=named_seconds(args.step_seconds),
        defaults=RequestDefaults(sampling(args), args.max_new_tokens),
        command=command(args),
    )


def command(args: argparse.Namespace) -> tuple[str, ...]:
    """Starts this role again, in another process."""
    return (*LAUNCH, *args.argv)


def sampling(args: argparse.Namespace) -> SamplingParams:
    """What was given, the rest as it is by default. Raises ValueError."""
    from tandem.speculation.types import SAMPLING_FIELDS, SamplingParams

    return SamplingParams(**{name: getattr(args, name) for name in SAMPLING_FIELDS if getattr(args, name) is not None})


def security(args: argparse.Namespace) -> Security:
    """Who may reach a server, how, and with how much."""
    from tandem.services.security.config import Security
    from tandem.services.security.limits import MESSAGE_BYTES, ServerLimits, message_bytes
    from tandem.services.security.tls import tls_config
    from tandem.services.security.tokens import AcceptedTokens

    most = args.max_message_bytes
    if most is None:  # NxD Inference may be told its sequence length elsewhere
        length, prompt = args.sequence_length or 512, args.max_prompt_bytes
        most = MESSAGE_BYTES if args.backend == "nxdi" else message_bytes(length, prompt)
    return Security(
        tls=tls_config(args.tls_cert, args.tls_key, args.tls_client_ca),
        tokens=AcceptedTokens(args.accept_tokens) if args.accept_tokens else None,
        insecure=args.insecure,
        limits=ServerLimits(args.max_sessions_per_identity, args.max_requests_per_identity, args.max_prompt_bytes),
        max_message_bytes=most,
        log_prompts=args.log_prompts,
    )


def credentials(args: argparse.Namespace) -> Credentials:
    """What calls show, and whom they trust; compare_architectures.py has the same flags."""
    from tandem.rpc.credentials import Credentials

    return Credentials(
        ca=args.tls_ca,
        cert=args.tls_client_cert,
        key=args.tls_client_key,
        server_name=args.tls_server_name,
        token_file=args.token_file,
        token_env=args.token_env,
        insecure=args.insecure,
    )


def pipeline_of(args: argparse.Namespace) -> Pipeline:
    """Whether the rounds of a distributed loop overlap."""
    from tandem.speculation.depth import Pipeline

    return Pipeline.named(args.pipeline)


def client_config(args: argparse.Namespace) -> ClientConfig:
    """What to ask and whom."""
    from tandem.clients.terminal import ClientConfig
    from tandem.speculation.types import SAMPLING_FIELDS, GenerationRequest, Rule

    prompts = (*(args.prompt or ()), *_file_prompts(args.prompt_text))
    if not prompts:
        raise ValueError("prompt: give --prompt TEXT or --prompt_text FILE")
    request = GenerationRequest(
        text="",
        chat=args.chat,
        sampling=sampling(args),
        unsaid=frozenset(name for name in SAMPLING_FIELDS if getattr(args, name) is None),
        max_new_tokens=args.max_new_tokens,
        max_total_tokens=args.sequence_length,
        speculation_length=speculation_length(args.speculation_length),
        stop_strings=tuple(args.stop),
        ignore_end_of_sequence=args.ignore_eos,
        rule=Rule.named(args.rule),
    )
    return ClientConfig(
        addresses_of(args.target_host, args.port),
        prompts,
        request,
        profile=args.profile,
        timeout=args.timeout,
        reconnect_seconds=args.reconnect_seconds,
        otlp_endpoint=args.otlp_endpoint,
        credentials=credentials(args),
    )


def accept_config(args: argparse.Namespace) -> AcceptConfig:
    """Which pair to measure, on what. The rounds go up to the speculation length asked for."""
    from tandem.comparison.measuring.workloads import built_in_prompts, given_prompts, read_prompt_file
    from tandem.training.acceptance.measure import AcceptConfig

    prompts = given_prompts(args.prompt or (), args.chat)
    prompts += read_prompt_file(Path(args.prompt_text), args.chat) if args.prompt_text else ()
    asked = speculation_length(args.speculation_length)
    longest = 8 if asked is None else asked
    args.speculation_length = str(max(1, longest))
    return AcceptConfig(
        models=model_config(args, args.target_model or args.model),
        prompts=prompts or built_in_prompts(),
        sampling=sampling(args),
        max_new_tokens=64 if args.max_new_tokens is None else args.max_new_tokens,
        longest=longest,
    )


def compile_config(args: argparse.Namespace) -> CompileConfig:
    """What to compile, for which device and buckets."""
    from tandem.engine.compile_ahead import CompileConfig

    parts = tuple(part for part in (args.compile_for or "").split(",") if part)
    return CompileConfig(model_config(args, args.target_model or args.model), parts, command(args))


def advice_config(args: argparse.Namespace) -> AdviceConfig:
    """Whose measurements, for which link and load."""
    from tandem.comparison.analysis.advice import AdviceConfig

    if args.report is None:
        raise ValueError("report: give --report comparison.json, which compare_architectures.py writes")
    return AdviceConfig(Path(args.report), args.rtt_ms, args.clients)


def plan_config(args: argparse.Namespace) -> PlanConfig:
    """What to plan for. A tp_degree of 1, the flag's default, lets the plan choose; --core_count 1 asks for one."""
    from tandem.planning.plan import PlanConfig

    target = args.target_model or args.model
    if args.instance is None:
        from tandem.planning.instances import INSTANCES

        raise ValueError(f"instance: give --instance, one of {', '.join(INSTANCES)}")
    if target is None:
        raise ValueError("target_model: give --target_model DIR, a folder with a config.json")
    return PlanConfig(
        instance=args.instance,
        target_model=target,
        draft_model=args.draft_model,
        backend=args.backend,
        dtype=args.dtype,
        quantization=args.quantization,
        keep=tuple(part for part in args.modules_to_not_convert.split(",") if part),
        batch=args.batch,
        length=args.sequence_length or 512,
        drafts=most_drafts(args),
        context_buckets=args.context_buckets,
        decode_buckets=args.decode_buckets,
        degree=args.tp_degree if args.tp_degree > 1 else None,
        cores=args.core_count,
        lnc=args.lnc,
        row_buckets=numbers("batch_buckets", args.batch_buckets),
        draft_buckets=numbers("draft_buckets", args.draft_buckets),
        chunk=args.prefill_chunk,
    )


def _file_prompts(file: str | None) -> tuple[str, ...]:
    from tandem.clients.prompts import read_prompts

    if file is None:
        return ()
    try:
        return tuple(text for _, text in read_prompts(Path(file)))
    except ValueError as error:
        raise ValueError(f"prompt_text: {error}") from None


def addresses_of(hosts: str, port: int) -> str:
    """HOST:PORT of each HOST or HOST:PORT in a list with commas."""
    return ",".join(address_of(host.strip(), port) for host in hosts.split(","))


def address_of(host: str, port: int) -> str:
    if host.count(":") > 1 and not host.startswith("["):
        host = f"[{host}]"  # an IPv6 address alone
    return host if ":" in host.rpartition("]")[2] else f"{host}:{port}"


def draft_address(given: str | None) -> str | None:
    """HOST:PORT, checked; a port to guess does not exist."""
    if given is None:
        return None
    host, _, port = given.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"draft_host: {given!r} is not HOST:PORT")
    return given

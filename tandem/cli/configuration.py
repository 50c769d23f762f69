"""Builds each role's validated configuration from the parsed flags. Imports a room only when a role needs it."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.request_flags import processing
from tandem.cli.values import auto_or_count, numbers, split_list
from tandem.launch import LAUNCH

if TYPE_CHECKING:
    from tandem.checkpoints.convert import ConvertConfig
    from tandem.clients.remote_prefill import PrefillConfig
    from tandem.clients.terminal import ClientConfig
    from tandem.comparison.analysis.advice import AdviceConfig
    from tandem.engine.compile_ahead import CompileConfig
    from tandem.engine.model_config import ModelConfig
    from tandem.planning.plan import PlanConfig
    from tandem.rpc.credentials import Credentials
    from tandem.runners.nxdi.settings import NxdiSettings
    from tandem.services.engine_port.port import EngineAddress
    from tandem.services.gateway.config import GatewayConfig
    from tandem.services.role_config import RoleConfig
    from tandem.speculation.depth import Pipeline
    from tandem.speculation.types import SamplingParams
    from tandem.training.acceptance.measure import AcceptConfig

STARTED = time.monotonic()
CHUNK = 64  # default number of prompt tokens per step
DEFAULT_MAX_DRAFT = 5  # default maximum of draft tokens per round on a server


def model_config(args: argparse.Namespace, model: str | None) -> ModelConfig:
    """Builds the configuration of a role's models: where they run and in which shape."""
    from tandem.checkpoints.adapters import adapter_choices
    from tandem.engine.model_config import DraftChoice, ModelConfig
    from tandem.runners.loading import Execution, Shape
    from tandem.runners.torch.buckets import RequestedBuckets
    from tandem.speculation.features import FeatureFormat, FeatureWish

    nxdi = args.backend == "nxdi"  # it shards models among cores itself
    k = auto_or_count("speculation_length", args.speculation_length)
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
            args.weights,
        ),
        shape=Shape(
            args.batch,
            args.sequence_length or 512,
            most_drafts(args),
            CHUNK if args.prefill_chunk is None else args.prefill_chunk,
            RequestedBuckets(
                numbers("batch_buckets", args.batch_buckets, int), numbers("draft_buckets", args.draft_buckets, int)
            ),
        ),
        model=model,
        draft=DraftChoice(
            args.draft,
            args.draft_model,
            _switched_on("branches", args.branches),
            FeatureWish(FeatureFormat.named(args.feature_format), args.feature_context),
        ),
        backend=args.backend,
        default_k=k,
        settings=nxdi_settings(args) if nxdi else None,
        adapters=adapter_choices(args.adapters),
        draft_adapters=adapter_choices(args.draft_adapters, "draft_adapters"),
        hand_out_features=layers_handed_out(args.hand_out_features),
    )


def layers_handed_out(given: str) -> tuple[int, ...] | None:
    """Returns after how many layers a target hands out features: None: it does not, empty: the usual ones."""
    if given == "off":
        return None
    try:
        layers = () if given == "on" else numbers("hand_out_features", given, int)
    except ValueError:
        layers = ()
    if given != "on" and not layers:
        raise ValueError(f"hand_out_features: {given!r} is not off, on, or layers such as 2,15,27")
    return layers


def most_drafts(args: argparse.Namespace) -> int:
    """Returns the most draft tokens that a round may have. Raises ValueError."""
    k, most = auto_or_count("speculation_length", args.speculation_length), args.max_speculation_length
    if most is None:
        return DEFAULT_MAX_DRAFT if k is None else k
    if k is not None and k > most:
        raise ValueError(f"speculation_length: {k} is above max_speculation_length {most}")
    return int(most)


def nxdi_settings(args: argparse.Namespace) -> NxdiSettings:
    """Builds the settings that only --backend nxdi has."""
    from tandem.checkpoints.adapters import adapter_choices
    from tandem.runners.nxdi.settings import NxdiSettings, read_neuron_config

    return NxdiSettings(
        tp_degree=args.tp_degree,
        neuron_config=read_neuron_config(args.neuron_config),
        draft_neuron_config=read_neuron_config(args.draft_neuron_config, "draft_neuron_config"),
        compiled_dir=args.compiled_dir,
        artifacts=args.artifacts,
        eagle=args.eagle,
        pair=args.pair,
        adapters=adapter_choices(args.adapters),
    )


def role_config(args: argparse.Namespace, model: str | None) -> RoleConfig:
    """Builds the whole configuration of a server."""
    from tandem.cli.security import adapter_admin, server_security
    from tandem.engine.generator import RequestDefaults
    from tandem.engine.prefix_cache import PrefixSharing
    from tandem.engine.step_watch import parse_step_seconds
    from tandem.runners.startup import Startup
    from tandem.services.observability.setup import ObservabilityConfig
    from tandem.services.role_config import RoleConfig
    from tandem.services.server import ServeConfig
    from tandem.services.shutdown import ShutdownDeadline

    startup = Startup(STARTED)
    startup.add("importing", startup.total())
    return RoleConfig(
        serve=ServeConfig(
            args.host,
            args.port,
            args.ready_file,
            args.drain_seconds,
            startup,
            server_security(args),
            args.health_port,
            engine_address(args),
            ShutdownDeadline(),
        ),
        models=model_config(args, model),
        target_address=None if args.propose_only else with_default_ports(args.target_host, args.target_port),
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
        step_seconds=parse_step_seconds(args.step_seconds),
        defaults=RequestDefaults(sampling(args), args.max_new_tokens),
        command=command(args),
        prefixes=PrefixSharing(args.prefix_sharing, args.prefix_cache_mb),
        adapter_admin=adapter_admin(args),
        prefill=prefill_config(args),
        prefill_queue=args.prefill_queue,
        kv_cache_mb=args.kv_cache_mb,
    )


def engine_address(args: argparse.Namespace) -> EngineAddress | None:
    """Returns where a server listens for gateways, or None. Raises ValueError."""
    from tandem.services.engine_port.port import EngineAddress

    if args.engine_port is None:
        return None
    if find_spec("smg_grpc_proto") is None:
        raise ValueError("engine_port: smg-grpc-proto is not installed; pip install 'tandem-speculative[openai]'")
    return EngineAddress(args.engine_port, args.engine_host)


def gateway_config(args: argparse.Namespace) -> GatewayConfig:
    """Builds the gateway's configuration. Raises ValueError."""
    from tandem.services.gateway.config import GatewayConfig

    return GatewayConfig(
        workers=split_list(args.workers) if args.workers else (),
        host=args.host,
        port=args.http_port,
        worker_flags=args.worker_flags,
        flags=args.gateway_flags,
        queue=args.queue,
        accept_tokens=args.accept_tokens,
        metrics_port=args.metrics_port,
        metrics_host=args.metrics_host,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        insecure=args.insecure,
        drain_seconds=args.drain_seconds,
        ready_file=args.ready_file,
    )


def command(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the command that starts this role again, in another process."""
    return (*LAUNCH, *args.argv)


def sampling(args: argparse.Namespace) -> SamplingParams:
    """Returns the sampling that the flags give, with defaults for the rest. Raises ValueError."""
    from tandem.speculation.types import SAMPLING_FIELDS, SamplingParams

    return SamplingParams(**{name: getattr(args, name) for name in SAMPLING_FIELDS if getattr(args, name) is not None})


def credentials(args: argparse.Namespace) -> Credentials:
    """Builds the credentials of outgoing calls; `tandem compare` has the same flags."""
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


def _switched_on(name: str, value: str) -> bool:
    if value not in ("off", "on"):
        raise ValueError(f"{name}: {value!r} is not one of off, on")
    return value == "on"


def pipeline_of(args: argparse.Namespace) -> Pipeline:
    """Returns whether the rounds of a distributed loop overlap."""
    from tandem.speculation.depth import Pipeline

    return Pipeline.named(args.pipeline)


def client_config(args: argparse.Namespace) -> ClientConfig:
    """Builds a client's prompts, request and addresses."""
    from tandem.clients.terminal import ClientConfig
    from tandem.speculation.types import SAMPLING_FIELDS, GenerationRequest, Rule

    prompts = (*(args.prompt or ()), *_file_prompts(args.prompt_text))
    if not prompts:
        raise ValueError("prompt: give --prompt TEXT or --prompt_text FILE")
    request = GenerationRequest(
        text="",
        chat=args.chat,
        sampling=replace(sampling(args), **processing(args)),
        unset_sampling=frozenset(name for name in SAMPLING_FIELDS if getattr(args, name) is None),
        max_new_tokens=args.max_new_tokens,
        max_total_tokens=args.sequence_length,
        speculation_length=auto_or_count("speculation_length", args.speculation_length),
        stop_strings=tuple(args.stop),
        ignore_end_of_sequence=args.ignore_eos,
        rule=Rule.named(args.rule),
        logprobs=args.logprobs,
        adapter=args.adapter or "",
    )
    return ClientConfig(
        with_default_ports(args.target_host, args.port),
        prompts,
        request,
        profile=args.profile,
        timeout=args.timeout,
        reconnect_seconds=args.reconnect_seconds,
        otlp_endpoint=args.otlp_endpoint,
        credentials=credentials(args),
    )


def accept_config(args: argparse.Namespace) -> AcceptConfig:
    """Builds an acceptance measurement. Its rounds go up to the speculation length asked for."""
    from tandem.comparison.measuring.workloads import built_in_prompts, given_prompts, read_prompt_file
    from tandem.training.acceptance.measure import AcceptConfig

    prompts = given_prompts(args.prompt or (), args.chat)
    prompts += read_prompt_file(Path(args.prompt_text), args.chat) if args.prompt_text else ()
    asked = auto_or_count("speculation_length", args.speculation_length)
    longest = 8 if asked is None else asked
    args.speculation_length = str(max(1, longest))
    return AcceptConfig(
        models=model_config(args, args.target_model or args.model),
        prompts=prompts or built_in_prompts(),
        sampling=sampling(args),
        adapter=args.adapter or "",
        max_new_tokens=64 if args.max_new_tokens is None else args.max_new_tokens,
        longest=longest,
    )


def compile_config(args: argparse.Namespace) -> CompileConfig:
    """Builds the list of graphs to compile, and for which device and buckets."""
    from tandem.engine.compile_ahead import CompileConfig

    parts = split_list(args.compile_for)
    return CompileConfig(model_config(args, args.target_model or args.model), parts, command(args))


def convert_config(args: argparse.Namespace) -> ConvertConfig:
    """Builds the configuration of a conversion. Raises ValueError."""
    from tandem.checkpoints.convert import ConvertConfig

    flag = "draft_model" if args.convert == "eagle" else "model"
    source = getattr(args, flag)
    if source is None:
        raise ValueError(f"{flag}: give --{flag} DIR")
    if args.output is None:
        raise ValueError("output: give --output DIR, the folder to write to")
    target = Path(args.target_model) if args.target_model else None
    return ConvertConfig(Path(source), Path(args.output), args.convert or "", target, int(args.shard_gb * 10**9))


def advice_config(args: argparse.Namespace) -> AdviceConfig:
    """Builds a request for advice: the measurements, the link and the load."""
    from tandem.comparison.analysis.advice import AdviceConfig

    if args.report is None:
        raise ValueError("report: give --report comparison.json, which compare_architectures.py writes")
    return AdviceConfig(Path(args.report), args.rtt_ms, args.clients, args.link_mbps)


def plan_config(args: argparse.Namespace) -> PlanConfig:
    """Builds a plan's input. A tp_degree of 1, the default, lets the plan choose; --core_count 1 asks for one."""
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
        keep=split_list(args.modules_to_not_convert),
        batch=args.batch,
        length=args.sequence_length or 512,
        drafts=most_drafts(args),
        context_buckets=args.context_buckets,
        decode_buckets=args.decode_buckets,
        degree=args.tp_degree if args.tp_degree > 1 else None,
        cores=args.core_count,
        lnc=args.lnc,
        compile_minutes=args.compile_minutes,
        row_buckets=numbers("batch_buckets", args.batch_buckets, int),
        draft_buckets=numbers("draft_buckets", args.draft_buckets, int),
        chunk=args.prefill_chunk,
    )


def prefill_config(args: argparse.Namespace) -> PrefillConfig | None:
    """Returns where a target has prompts computed, or None. Raises ValueError."""
    from tandem.clients.remote_prefill import PrefillConfig

    if args.prefill is None:
        return None
    return PrefillConfig(args.prefill, args.prefill_min_tokens, args.prefill_timeout_s)


def _file_prompts(file: str | None) -> tuple[str, ...]:
    from tandem.clients.prompts import read_prompts

    if file is None:
        return ()
    try:
        return tuple(text for _, text in read_prompts(Path(file)))
    except ValueError as error:
        raise ValueError(f"prompt_text: {error}") from None


def with_default_ports(hosts: str, port: int) -> str:
    """Returns HOST:PORT for each HOST or HOST:PORT in a comma-separated list."""
    return ",".join(with_default_port(host.strip(), port) for host in hosts.split(","))


def with_default_port(host: str, port: int) -> str:
    """Returns HOST:PORT; `port` is used where `host` has none."""
    if host.count(":") > 1 and not host.startswith("["):
        host = f"[{host}]"  # a bare IPv6 address
    return host if ":" in host.rpartition("]")[2] else f"{host}:{port}"


def draft_address(given: str | None) -> str | None:
    """Checks HOST:PORT. There is no default port."""
    if given is None:
        return None
    host, _, port = given.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"draft_host: {given!r} is not HOST:PORT")
    return given

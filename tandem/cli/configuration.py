"""Configures and starts servers by the options."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from tandem.cli.asking import sampling
from tandem.cli.flags import Options
from tandem.cli.models import command, model_config
from tandem.cli.option import built, credentials, split_list, with_default_ports
from tandem.cli.roles import STARTED
from tandem.clients.prefill_client import PrefillConfig
from tandem.engine.generator import RequestDefaults
from tandem.engine.prefix_cache import PrefixSharing
from tandem.engine.step_watch import parse_step_seconds
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.runners.startup import Startup
from tandem.services.role_config import RoleConfig
from tandem.services.security.access import Security
from tandem.services.security.callers import AcceptedTokens
from tandem.services.security.limits import MESSAGE_BYTES, ServerLimits, message_bytes
from tandem.services.security.tls import tls_config
from tandem.services.server import HttpAddress, ServeConfig
from tandem.services.server_roles import run_role
from tandem.services.shutdown import ShutdownDeadline
from tandem.speculation.sampling import SAMPLING_FIELDS, member_named
from tandem.speculation.verification_mode import Pipeline


def serve(args: Options) -> Coroutine[Any, Any, int]:
    model = args.target_model or args.model
    if args.role == "target":
        model = args.model or args.target_model
    return run_role(args.role, role_config(args.with_own_draft(), model))


def role_config(args: Options, model: str | None) -> RoleConfig:
    if args.draft_host is not None and len(parse_addresses(args.draft_host, "draft_host")) > 1:
        raise ValueError(f"draft_host: {args.draft_host!r} names several; a target asks one DraftWorker")
    startup = Startup(STARTED)
    startup.add("importing", startup.total())
    prefill = args.prefill and PrefillConfig(args.prefill, args.prefill_min_tokens, args.prefill_timeout_s)
    return built(
        RoleConfig,
        args,
        serve=built(
            ServeConfig,
            args,
            startup=startup,
            security=server_security(args),
            http=http_address(args),
            ending=ShutdownDeadline(),
        ),
        models=model_config(args, model),
        target_address=None if args.propose_only else with_default_ports(args.target_host, args.target_port),
        draft_address=args.draft_host,
        pipeline=member_named(Pipeline, "pipeline", args.pipeline),
        credentials=credentials(args),
        step_seconds=parse_step_seconds(args.step_seconds),
        defaults=request_defaults(args),
        command=command(args),
        prefixes=PrefixSharing(args.prefix_sharing, args.prefix_cache_mb),
        prefill=prefill or None,
        own_length=own_length(args),
        own_slots="batch" not in args.given,
    )


def own_length(args: Options) -> bool:
    """Whether sequences are as long as models and memory allow."""
    return args.backend == "torch" and args.sequence_length is None and args.kv_cache_mb is None


def request_defaults(args: Options) -> RequestDefaults:
    given = {name: f"--{name}" for name in (*SAMPLING_FIELDS, "max_new_tokens") if name in args.given}
    return RequestDefaults(sampling(args), args.max_new_tokens, given)


def http_address(args: Options) -> HttpAddress | None:
    if args.http_port is None:
        return None
    return HttpAddress(args.http_port, args.http_host, split_list(args.allowed_hosts))


def server_security(args: Options) -> Security:
    most = args.max_message_bytes
    if most is None:
        from_file = args.backend == "nxdi" or own_length(args)  # the sequence length
        most = MESSAGE_BYTES if from_file else message_bytes(args.length, args.max_prompt_bytes)
    return built(
        Security,
        args,
        tls=tls_config(args.tls_cert, args.tls_key, args.tls_client_ca),
        tokens=AcceptedTokens(args.accept_tokens) if args.accept_tokens else None,
        limits=ServerLimits(args.max_sessions_per_identity, args.max_requests_per_identity, args.max_prompt_bytes),
        max_message_bytes=most,
    )

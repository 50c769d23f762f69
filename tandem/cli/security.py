"""Builds a server's security configuration from the parsed flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.cli.values import split_list
from tandem.services.adapter_admin import AdapterAdminConfig
from tandem.services.security.config import Security
from tandem.services.security.limits import MESSAGE_BYTES, ServerLimits, message_bytes
from tandem.services.security.tls import tls_config
from tandem.services.security.tokens import AcceptedTokens


def server_security(args: argparse.Namespace) -> Security:
    """Builds a server's TLS, tokens and limits."""
    most = args.max_message_bytes
    if most is None:  # NxD Inference may have its sequence length from a file
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


def adapter_admin(args: argparse.Namespace) -> AdapterAdminConfig | None:
    """Returns from where adapters may be added to a running server, and by whom. Raises ValueError."""
    if args.adapter_root is None:
        return None
    admins = frozenset(split_list(args.adapter_admins))
    if not admins and (args.accept_tokens or args.tls_client_ca):
        raise ValueError("adapter_root: callers have identities: name those who may add adapters, --adapter_admins")
    return AdapterAdminConfig(Path(args.adapter_root), admins)

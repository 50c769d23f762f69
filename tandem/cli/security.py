"""Builds a server's security configuration from the parsed flags."""

from __future__ import annotations

import argparse

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

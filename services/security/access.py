"""A server's access control: TLS, tokens, limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from tandem.installing import check_installed
from tandem.rpc.credentials import on_this_machine
from tandem.rpc.endpoint_pool import bare_host
from tandem.services.calls import CallObserver
from tandem.services.security.call_limits import TransportInterceptor
from tandem.services.security.callers import AcceptedTokens
from tandem.services.security.limits import MESSAGE_BYTES, ServerLimits
from tandem.services.security.tls import TlsConfig, server_credentials

log = logging.getLogger("tandem.security")

MIN_MESSAGE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Security:
    """Without `tls` or `insecure` only local hosts may be listened at. `log_prompts` logs all content."""

    tls: TlsConfig | None = None
    tokens: AcceptedTokens | None = None
    insecure: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits)
    max_message_bytes: int = MESSAGE_BYTES
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if self.max_message_bytes < MIN_MESSAGE_BYTES:
            raise ValueError(f"max_message_bytes: {self.max_message_bytes} is below {MIN_MESSAGE_BYTES}")
        if self.tls is not None and self.tls.client_ca is not None and self.tokens is None:
            check_installed("tls_client_ca", "mtls", "cryptography")  # which reads the names in certificates

    def check_host(self, host: str, flag: str = "host") -> None:
        """Raises ValueError naming `flag` if `host` is invalid or not allowed."""
        bare_host(host, flag)
        if self.tls is None and not self.insecure and not on_this_machine(host):
            raise ValueError(
                f"{flag}: {host} can be reached from other machines, and there is no TLS: "
                f"give --tls_cert and --tls_key, or pass --insecure"
            )

    def interceptor(self, observers: Sequence[CallObserver] = ()) -> TransportInterceptor:
        return TransportInterceptor(self.limits, observers, self.tokens, self.log_prompts)

    def server(
        self,
        observers: Sequence[CallObserver] = (),
        behind: Sequence[grpc.aio.ServerInterceptor] = (),
        options: Sequence[tuple[str, int]] = (),
    ) -> grpc.aio.Server:
        """Creates a gRPC server. `behind`: further interceptors."""
        own = (
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_concurrent_streams", self.limits.max_calls_per_caller),
            ("grpc.keepalive_time_ms", 60_000),  # ends the calls of dead connections
            ("grpc.keepalive_timeout_ms", 20_000),
        )
        return grpc.aio.server(interceptors=[self.interceptor(observers), *behind], options=(*own, *options))

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        if self.tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, server_credentials(self.tls)))

    def log_access(self, host: str) -> None:
        what = ["no TLS" if self.tls is None else "TLS with client certificates" if self.tls.client_ca else "TLS"]
        what.append("tokens" if self.tokens else "no tokens")
        if self.log_prompts:
            what.append("prompts are logged")
        bare = self.tls is None and not on_this_machine(host)
        log.log(
            logging.WARNING if bare or self.log_prompts else logging.INFO, "access on %s: %s", host, ", ".join(what)
        )

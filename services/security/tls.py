"""Reads a server's certificates and reloads changed files for new connections."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from tandem.rpc.credentials import Reread, check_readable, warn_if_others_read

Form = TypeVar("Form")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files; `client_ca` requires clients' certificates (mTLS). Raises ValueError if unusable."""

    cert: str
    key: str
    client_ca: str | None = None

    def __post_init__(self) -> None:
        check_readable("tls_cert", self.cert)
        check_readable("tls_key", self.key)
        if self.client_ca is not None:
            check_readable("tls_client_ca", self.client_ca)
        check_pair(self)
        warn_if_others_read("tls_key", self.key)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.cert, self.key, self.client_ca) if self.client_ca else (self.cert, self.key)


def tls_config(cert: str | None, key: str | None, client_ca: str | None) -> TlsConfig | None:
    if cert is not None and key is not None:
        return TlsConfig(cert, key, client_ca)
    for name, value, other in (("cert", cert, "tls_key"), ("key", key, "tls_cert")):
        if value is not None:
            raise ValueError(f"tls_{name}: given without {other}")
    if client_ca is not None:
        raise ValueError("tls_client_ca: given without tls_cert and tls_key")
    return None


def check_pair(config: TlsConfig) -> None:
    # gRPC accepts any files and fails at every handshake.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.cert, config.key, password="")  # never prompt at the terminal
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "encrypted, or not PEM"
        raise ValueError(f"tls_key: {config.key} is not the key of {config.cert} ({why})") from None
    if config.client_ca is not None:
        try:
            context.load_verify_locations(config.client_ca)
        except ssl.SSLError:
            raise ValueError(f"tls_client_ca: {config.client_ca} holds no PEM certificate") from None


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials:
    certificates = reread(config, _in_grpcs_form)
    return grpc.dynamic_ssl_server_credentials(
        certificates.value,
        lambda: certificates.value if certificates.changed() else None,
        require_client_authentication=config.client_ca is not None,
    )


def reread(config: TlsConfig, form: Callable[[TlsConfig], Form]) -> Reread[Form]:
    """Returns certificates in a library's form, read again on change."""

    def read() -> Form:
        check_pair(config)
        return form(config)

    return Reread(read, *config.files)


def _in_grpcs_form(config: TlsConfig) -> grpc.ServerCertificateConfiguration:
    ca = Path(config.client_ca).read_bytes() if config.client_ca else None
    pair = (Path(config.key).read_bytes(), Path(config.cert).read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], ca)

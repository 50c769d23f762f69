"""Configuration of the gateway, and the arguments of smg that it stands for."""

from __future__ import annotations

import importlib.util
import secrets
import shlex
from dataclasses import dataclass

from tandem.installing import install_command
from tandem.rpc.credentials import on_this_machine
from tandem.rpc.endpoint_pool import parse_addresses
from tandem.rpc.secret_files import lines_of, warn_if_others_read
from tandem.services.security.tls import TlsConfig
from tandem.services.security.tokens import read_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Where the gateway listens for HTTP, and the HOST:PORT of the engine ports of its `workers`.

    `queue`: requests that may wait besides those with a slot. `flags` are smg's own. `metrics_port` None: a free one on
    this machine, since smg always has one. `accept_tokens`: a file of lines `identity token`, the API keys of clients.
    """

    workers: tuple[str, ...]
    host: str
    port: int
    flags: str
    queue: int
    metrics_port: int | None = None
    metrics_host: str
    tls_cert: str | None = None
    tls_key: str | None = None
    accept_tokens: str | None = None
    insecure: bool
    drain_seconds: float
    ready_file: str | None = None

    def __post_init__(self) -> None:
        for library in ("smg", "smg_grpc_proto"):
            if importlib.util.find_spec(library) is None:
                raise ValueError(f"gateway: {library} is not installed; {install_command('openai')}")
        for name, port in (("http_port", self.port), ("metrics_port", self.metrics_port or 1)):
            if not 0 <= port <= 65535:
                raise ValueError(f"{name}: {port} is outside 0 to 65535")
        if self.queue < 0:
            raise ValueError(f"queue: {self.queue} is below 0")
        if not self.workers:
            raise ValueError("workers: give --workers HOST:PORT,..., of servers; one server has its own --http_port")
        parse_addresses(",".join(self.workers), "workers")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert: give --tls_cert and --tls_key together")
        if self.tls_cert is None and not self.insecure and not on_this_machine(self.host):
            raise ValueError(
                f"host: {self.host} can be reached from other machines, and there is no TLS: "
                f"give --tls_cert and --tls_key, or pass --insecure"
            )
        _ = self.keys

    @property
    def tls(self) -> TlsConfig | None:
        return TlsConfig(self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else None

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys of clients, each as identity:key. Raises ValueError."""
        if self.accept_tokens is None:
            return ()
        read_tokens(self.accept_tokens)
        warn_if_others_read("accept_tokens", self.accept_tokens)
        keys = tuple(":".join(line.split()) for _, line in lines_of("accept_tokens", self.accept_tokens))
        if not keys or any(":sha256:" in key for key in keys):
            raise ValueError(f"accept_tokens: {self.accept_tokens}: smg needs lines `identity token`, without hashes")
        return keys

    @property
    def url(self) -> str:
        """The base URL of OpenAI clients on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"{'https' if self.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def balanced(self) -> bool:
        """Whether there may be load balancers before it."""
        return not on_this_machine(self.host)

    def arguments(self, slots: int, port: int, metrics_port: int) -> list[str]:
        """Returns the arguments of smg, behind front.py at `port`, for workers that run `slots` requests at once.

        New work goes to the least loaded worker, by what the workers say of their load; requests with the same key
        (header X-SMG-Routing-Key) go to the same one. Requests beyond slots and queue get 429 with Retry-After. Nothing
        of a request or an answer is kept, and nobody can register workers over HTTP: the key to that is thrown away.
        """
        options = {
            "host": "127.0.0.1",
            "port": port,
            "policy": "least_load",
            "load-monitor-interval": 1,
            "max-concurrent-requests": slots + self.queue,
            "queue-size": 0,
            "history-backend": "none",
            "log-level": "warn",
            "prometheus-host": self.metrics_host,
            "prometheus-port": metrics_port,
            "worker-startup-check-interval": 1,
            "shutdown-grace-period-secs": max(1, round(self.drain_seconds)),
            "control-plane-api-keys": f"tandem:tandem:admin:{secrets.token_hex(16)}",
        }
        named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        keys = [word for key in self.keys for word in ("--tenant-api-key", key)]
        urls = [f"grpc://{worker}" for worker in self.workers]
        return ["launch", *named, *keys, "--worker-urls", *urls, "--routing-key-override", *shlex.split(self.flags)]

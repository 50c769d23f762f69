"""The HTTP listening address."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.installing import check_installed


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """`port` 0: a free one. `allowed_hosts`: Host headers accepted without a key. Raises ValueError."""

    port: int
    host: str
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"http_port: {self.port} is outside 0 to 65535")
        check_installed("http_port", "http", "uvicorn", "h11")

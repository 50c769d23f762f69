"""Common types of peers, engines of others."""

from __future__ import annotations

from dataclasses import dataclass


class PeerFailed(RuntimeError):
    """A peer did not start or did not answer; one line."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A peer's description of itself."""

    version: str
    threads: int
    dtype: str  # of weights
    startup_seconds: float
    torch: str = ""  # version, if used
    interface: str = "in process"

    def __str__(self) -> str:
        uses = f", torch {self.torch}" if self.torch else ""
        return f"{self.version}{uses}, {self.dtype}, {self.threads} threads, {self.interface}"

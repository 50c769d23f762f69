"""What peers, engines of others, have in common."""

from __future__ import annotations

from dataclasses import dataclass


class PeerFailed(RuntimeError):
    """A peer did not start or did not answer; the message is one line."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A peer's description of itself. `dtype`: its format of weights; `torch`: its version, where that is used."""

    version: str
    threads: int
    dtype: str
    startup_seconds: float
    torch: str = ""
    interface: str = "in process"

    def __str__(self) -> str:
        uses = f", torch {self.torch}" if self.torch else ""
        return f"{self.version}{uses}, {self.dtype}, {self.threads} threads, {self.interface}"

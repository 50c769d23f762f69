"""The row type of the flag table in tandem/cli/flags.py: a flag's names, and the roles and backends that take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BACKENDS = ("torch", "nxdi", "toy")

SERVERS = ("target", "fused_target", "draft_worker")
ASKING = ("client", "fused_client", "draft")  # send their own prompts to a server
ALONE = ("verify_target", "verify_draft")
PROMPTED = (*ASKING, *ALONE)
DRAFTING = ("fused_target", "draft_worker", "draft", "accept", "compile")
PREFILL = "prefill"
LISTENING = (*SERVERS, PREFILL)
LOADING = (*LISTENING, "draft", *ALONE, "accept", "compile")
SHARED = ("target", "fused_target", "compile")  # their target can be sharded among ranks
GATEWAY = "gateway"
EVERY = (*LOADING, GATEWAY, "client", "fused_client", "advise", "plan", "doctor", "convert")

TORCH, NXDI, REAL = ("torch",), ("nxdi",), ("torch", "nxdi")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag. The first of `names` is the argument's; `options` are passed to argparse.

    `roles` take the flag; those that load models, with one of `backends` alone. `only` narrows a backend's roles.
    """

    names: tuple[str, ...]
    roles: tuple[str, ...]
    backends: tuple[str, ...] = BACKENDS
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def default(self) -> object:
        return self.options.get("default", False if self.options.get("action") == "store_true" else None)

    def takers(self, backend: str) -> tuple[str, ...]:
        """Returns the roles that take the flag with a backend."""
        return self.only.get(backend, self.roles) if backend in self.backends else ()


@dataclass(frozen=True, slots=True)
class Group:
    """Flags under one title of --help."""

    title: str
    flags: tuple[Flag, ...]


def flag(
    *names: str,
    to: tuple[str, ...],
    backends: tuple[str, ...] = BACKENDS,
    only: Mapping[str, tuple[str, ...]] | None = None,
    **options: Any,
) -> Flag:
    return Flag(names, to, backends, only or {}, options)


def switch(*names: str, to: tuple[str, ...], backends: tuple[str, ...] = BACKENDS, help: str) -> Flag:
    return Flag(names, to, backends, {}, {"action": "store_true", "help": help})

"""A row of the table of main.py's flags (tandem/cli/flags.py): what a flag is called, and which roles and backends take
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BACKENDS = ("torch", "nxdi", "toy")

SERVERS = ("target", "fused_target", "draft_worker")
ASKING = ("client", "fused_client", "draft")  # a server, for their own prompts
ALONE = ("verify_target", "verify_draft")
PROMPTED = (*ASKING, *ALONE)
DRAFTING = ("fused_target", "draft_worker", "draft", "accept", "compile")
LOADING = (*SERVERS, "draft", *ALONE, "accept", "compile")
SHARED = ("target", "fused_target", "compile")  # roles whose target ranks can share
EVERY = (*LOADING, "client", "fused_client", "advise", "plan", "doctor")

TORCH, NXDI, REAL = ("torch",), ("nxdi",), ("torch", "nxdi")


@dataclass(frozen=True, slots=True)
class Flag:
    """One row. `names`: the first is the argument's; `options` are argparse's.

    `roles` take it, of those that load models with one of `backends`; `only` narrows the roles for a backend further.
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
        """The roles that take it with a backend."""
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

"""Registers the backends that run models; each is imported when it is first used."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from tandem.installing import missing_package
from tandem.runners.protocol import Runner
from tandem.runners.startup import Startup

if TYPE_CHECKING:
    from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
    from tandem.checkpoints.locate import Checkpoint
    from tandem.checkpoints.tokenizers import Tokenizer
    from tandem.runners.loading import Execution, Shape

# Each module has a `BACKEND`. tandem_nxdi is a distribution of its own: packages/tandem-nxdi.
MODULES: Mapping[str, str] = MappingProxyType(
    {
        "torch": "tandem.runners.torch.backend",
        "nxdi": "tandem_nxdi.backend",
        "toy": "tandem.runners.toy",
    }
)
BACKENDS = tuple(MODULES)


class BackendSettings(Protocol):
    """Settings that only one backend understands."""

    @property
    def backend(self) -> str:
        """The name of that backend."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """How a model is to be loaded.

    `verifies`: it is a target, else a draft. `sole_model`: no other model shares its device thread. `settings`: the
    backend's own, if any were given. `head`: the EAGLE head that will read a target's hidden states, if one is to.
    """

    execution: Execution
    shape: Shape
    settings: BackendSettings | None = None
    verifies: bool = True
    sole_model: bool = False
    head: Checkpoint | None = None


class Backend(ABC):
    """Loads models and their runners; by default target and draft one by one, with software that is always there."""

    loads_pairs = False
    """Whether a target and its draft model are loaded together, by `load_pair`."""

    def require(self) -> None:
        """Raises ValueError, one line, unless the backend's software is installed."""
        return

    @abstractmethod
    def find(self, model: str | None) -> Checkpoint:
        """The checkpoint that `model` names (None: the default one). Raises CheckpointError."""

    @abstractmethod
    def adapter(self, choice: AdapterChoice) -> Adapter:
        """The LoRA adapter that is named, for its runners. Raises CheckpointError or ValueError, one line."""

    def tokenizer(self, checkpoint: Checkpoint) -> Tokenizer | None:
        """The backend's own tokenizer, or None if the checkpoint has one."""
        return None

    def draft_has_tokenizer(self, request: LoadRequest) -> bool:
        """Whether a draft that `load_pair` loads has a tokenizer, to be compared with the target's."""
        return True

    @abstractmethod
    def load(self, checkpoint: Checkpoint, request: LoadRequest, startup: Startup) -> Runner:
        """Loads a runner, not yet warmed up; on the device thread. Raises CheckpointError or ValueError, one line."""

    def load_pair(
        self, target: Checkpoint, draft: Checkpoint, request: LoadRequest, startup: Startup
    ) -> tuple[Runner, Runner]:
        """Loads target and draft as one graph; like `load`. Call it only if `loads_pairs`."""
        raise NotImplementedError("this backend loads target and draft one by one")

    def compile(self, target: Checkpoint, draft: Checkpoint | None, request: LoadRequest, part: str) -> Iterator[str]:
        """Compiles "target", "draft" or "fused", all that a server of it loads; yields a line about each result."""
        raise NotImplementedError("it has no graphs, or makes them one by one (tandem/engine/compile_ahead.py)")

    @abstractmethod
    def is_head(self, checkpoint: Checkpoint) -> bool:
        """Whether a draft is an EAGLE head, which `load_head` loads."""

    @abstractmethod
    def load_head(
        self, checkpoint: Checkpoint, target: Runner | Checkpoint, request: LoadRequest, startup: Startup
    ) -> Runner:
        """Loads a head that reads the hidden states of the runner `target`; like `load`.

        If the target is elsewhere: its checkpoint, of which only the embedding may be read.
        """

    def fuses(self, request: LoadRequest) -> bool:
        """Whether `load_pair` is to be called; else a pair is loaded apart alone."""
        return False

    def unfused(self, request: LoadRequest) -> Sequence[LoadRequest]:
        """How the models of a pair are loaded apart as well: the target, and a draft that can draft outside its graph.

        Empty if the graph answers every request, or is to do so alone.
        """
        return ()


def backend_named(name: str) -> Backend:
    """The backend called `name`. Raises ValueError if there is none."""
    if name not in MODULES:
        raise ValueError(f"backend: {name!r} is not one of {', '.join(BACKENDS)}")
    try:
        backend: Backend = importlib.import_module(MODULES[name]).BACKEND
    except ModuleNotFoundError as error:
        if (missing := missing_package(error.name)) is None:
            raise
        raise ValueError(f"backend: {missing}") from None
    return backend

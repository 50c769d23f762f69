"""The backends that run models, imported on first use."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from tandem.runners.protocol import Runner
from tandem.runners.startup import Startup

if TYPE_CHECKING:
    from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
    from tandem.checkpoints.locate import Checkpoint
    from tandem.checkpoints.tokenizers import Tokenizer
    from tandem.runners.load_runner import Execution, Shape

# Each module has a `BACKEND`. tandem_nxdi is packages/tandem-nxdi; the toy backend is there in a checkout alone.
MODULES: Mapping[str, str] = MappingProxyType(
    {"torch": "tandem.runners.load_runner", "nxdi": "tandem_nxdi.backend", "toy": "tests.toy"}
)
BACKENDS = tuple(MODULES)
ABSENT = {
    "tests": "toy is among the tests of a checkout",
    "tandem_nxdi": "tandem-nxdi is not installed: pip install tandem-nxdi"
    " (in a checkout: pip install ./packages/tandem-nxdi)",
}


class BackendSettings(Protocol):
    """Settings that only one backend understands."""

    @property
    def backend(self) -> str:
        """Its name."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """`verifies`: target, not draft. `sole_model`: alone on its device thread. `head`: EAGLE head of this target."""

    execution: Execution
    shape: Shape
    settings: BackendSettings | None = None
    verifies: bool = True
    sole_model: bool = False
    head: Checkpoint | None = None


class Backend(ABC):
    """Loads models and their runners; by default target and draft separately."""

    loads_pairs = False  # `load_pair` loads target and draft together

    def require(self) -> None:
        """Raises ValueError, one line, if the backend's software is missing."""
        return

    @abstractmethod
    def find(self, model: str | None) -> Checkpoint:
        """The checkpoint named `model` (None: the default). Raises CheckpointError."""

    @abstractmethod
    def adapter(self, choice: AdapterChoice) -> Adapter:
        """A LoRA adapter for this backend's runners. Raises CheckpointError or ValueError, one line."""

    def tokenizer(self, checkpoint: Checkpoint) -> Tokenizer:
        """The checkpoint's tokenizer. Raises CheckpointError or ValueError."""
        from tandem.checkpoints.tokenizers import HuggingFaceTokenizer

        return HuggingFaceTokenizer(checkpoint)

    def draft_has_tokenizer(self, request: LoadRequest) -> bool:
        """Whether a draft in `load_pair` has a tokenizer to compare with the target's."""
        return True

    @abstractmethod
    def load(self, checkpoint: Checkpoint, request: LoadRequest, startup: Startup) -> Runner:
        """Loads a runner, not warmed up; on the device thread. Raises CheckpointError or ValueError, one line."""

    def load_pair(
        self, target: Checkpoint, draft: Checkpoint, request: LoadRequest, startup: Startup
    ) -> tuple[Runner, Runner]:
        """Loads target and draft as one graph, if `loads_pairs`; see `load`."""
        raise NotImplementedError("this backend loads target and draft one by one")

    def compile(self, target: Checkpoint, draft: Checkpoint | None, request: LoadRequest, part: str) -> Iterator[str]:
        """Compiles "target", "draft" or "fused"; yields a line per result."""
        raise NotImplementedError("it has no graphs, or makes them one by one (tandem/engine/compile_ahead.py)")

    @abstractmethod
    def is_head(self, checkpoint: Checkpoint) -> bool:
        """Whether `load_head` loads this draft."""

    @abstractmethod
    def load_head(
        self, checkpoint: Checkpoint, target: Runner | Checkpoint, request: LoadRequest, startup: Startup
    ) -> Runner:
        """Loads an EAGLE head for `target` (a remote target's checkpoint: only its embedding is read); see `load`."""

    def fuses(self, request: LoadRequest) -> bool:
        """Whether `load_pair` loads this pair."""
        return False

    def unfused(self, request: LoadRequest) -> Sequence[LoadRequest]:
        """How to load a fused pair's models separately too; empty if the graph answers every request."""
        return ()


def backend_named(name: str) -> Backend:
    if name not in MODULES:
        raise ValueError(f"backend: {name!r} is not one of {', '.join(BACKENDS)}")
    try:
        backend: Backend = importlib.import_module(MODULES[name]).BACKEND
    except ModuleNotFoundError as error:
        missing = ABSENT.get((error.name or "").partition(".")[0])
        if missing is None:
            raise
        raise ValueError(f"backend: {missing}") from None
    return backend

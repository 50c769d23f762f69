"""A runner's abilities beyond the Runner protocol; tandem/engine/compatibility.py says which exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.speculation.features import FeatureInbox, FeatureSpec

if TYPE_CHECKING:
    from tandem.checkpoints.adapter_files import Adapter
    from tandem.runners.protocol import Runner
    from tandem.runners.startup import Startup


class No(str):
    """Why a runner lacks an ability."""


class Trait(Enum):
    """How a model runs; the value is its name in the documentation."""

    SHARED = "a target that several processes share (--tp_degree)"
    HEAD = "an EAGLE head"
    GRAPHS = "compiled graphs (--compile inductor or neuron)"
    WHOLE_SLOTS = "module code whose KV slots are preallocated (accelerators, other systems than Linux, EAGLE)"
    INEXACT = "module code of a draft; any steps whose bits depend on their shape (--fast)"
    NXD_INFERENCE = "NxD Inference"
    TOKENS_ONLY = "NxD Inference, with tokens chosen on the device"
    ONE_GRAPH = "NxD Inference, with target and draft in one graph"


PAGE = 16  # positions of a page; a native cache keeps the keys of 16 positions together


class PageStore(Protocol):
    """A fixed number of pages, used on the device thread. Page i holds positions PAGE * (first + i) and on."""

    def save(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Copies positions of `slot` to `pages`."""

    def load(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Copies `pages` to positions of `slot`."""

    def read(self, page: int) -> bytes:
        """A page's bytes, as in `Pages.format`."""

    def write(self, page: int, data: bytes) -> None:
        """Replaces a page by bytes that `read` returned, in any process."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Copies of pages of keys and values, with the same bits."""

    bytes: int  # per page, features included
    format: str  # equal in processes whose pages have the same bits
    store: Callable[[int], PageStore]  # allocates a number of pages


@dataclass(frozen=True, slots=True)
class MemoryOnDemand:
    """KV slots that take memory as they are written; none has any after `warm_up`."""

    spare_bytes: int  # maximum outside the rows' slots, for padding
    kv_bytes: Callable[[int], int]  # maximum by tokens of a sequence, drafts included
    give_back: Callable[[int, int], None]  # frees a slot's memory beyond tokens, on the device thread


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """Reads the features of `count` positions of `slot` from `start` on, in the layers and format of `spec`."""

    slot: int
    start: int
    count: int
    spec: FeatureSpec


class HandedOut(Protocol):
    """Features by slot and position."""

    def read(self, rows: Sequence[FeatureRow]) -> list[NDArray[np.float32]]:
        """Copies each row's features of all layers [count, layers * hidden]; on the device thread."""


@dataclass(frozen=True, slots=True)
class FeaturesOut:
    """A target's hidden states."""

    layer_count: int
    hidden_size: int
    hand_out: Callable[[Sequence[int]], HandedOut]  # once, on the device thread: later steps write these layers' states


@dataclass(frozen=True, slots=True)
class FeaturesIn:
    """A remote head's input."""

    layers: tuple[int, ...]
    target_hidden_size: int
    weights_revision_read: str  # of the target with the embedding; empty: the head's own
    follow: Callable[[int, FeatureInbox], None]  # connects a slot to its features


Fuse = Callable[["Runner", "Startup"], None]
PutAdapter = Callable[[int, "Adapter"], None]
"""Registers a LoRA adapter by a number above 0; a row has the same bits in every batch. Raises ValueError, one line."""
Yes = Literal[True]
UNABLE = No("its steps cannot")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Final once `warm_up` has returned and features are handed out."""

    traits: frozenset[Trait] = frozenset()
    pages: Pages | No = UNABLE
    adapters: PutAdapter | No = UNABLE
    memory_on_demand: MemoryOnDemand | No = UNABLE
    features_out: FeaturesOut | No = UNABLE
    features_in: FeaturesIn | No = UNABLE
    fuse: Fuse | No = UNABLE  # at startup, on the device thread; for `fused_with`
    logits: Yes | No = True  # on the host
    structures: Yes | No = True  # logits can be masked
    copied_drafts: Yes | No = True  # verifies lookup drafts
    proposals: Yes | No = True  # drafts for remote targets
    reprocess_accepted: bool = False  # feed accepted drafts again: their cache entries are guesses
    # A step takes the time of its tokens: `verify` takes PrefillRows last, `propose` tails of up to a chunk
    shared_steps: bool = False

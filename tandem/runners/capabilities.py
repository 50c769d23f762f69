"""Defines what a runner can do beyond the steps that every runner has, and why it cannot do the rest.

A runner says what it has and what it is; what the one excludes of the other is the table of
tandem/engine/compatibility.py, which an engine applies once, at start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol

from tandem.runners.feature_rows import HandedOut
from tandem.runners.pages import PageStore

if TYPE_CHECKING:
    from tandem.checkpoints.adapter_files import Adapter
    from tandem.runners.protocol import Runner
    from tandem.runners.startup import Startup
    from tandem.speculation.features import FeatureInbox


class No(str):
    """Why a runner cannot do something."""


class Trait(Enum):
    """How a model runs, as far as that decides what it can. The value names it in the documentation."""

    SHARED = "a target that several processes share (--tp_degree)"
    HEAD = "an EAGLE head"
    GRAPHS = "compiled graphs (--compile inductor or neuron)"
    WHOLE_SLOTS = "module code whose KV slots are preallocated (accelerators, other systems than Linux, EAGLE)"
    INEXACT = "module code of a draft; any steps whose bits depend on their shape (--fast)"
    NXD_INFERENCE = "NxD Inference"
    TOKENS_ONLY = "NxD Inference, with tokens chosen on the device"
    ONE_GRAPH = "NxD Inference, with target and draft in one graph"


class TakesAdapters(Protocol):
    """Takes LoRA adapters, which change what a model computes for the rows that name them.

    Rows of different adapters, and of none, share steps. A row has the same bits alone as beside any others; rows
    without an adapter have those of a runner that has no adapters. On the device thread, between steps.
    """

    def put_adapter(self, number: int, adapter: Adapter) -> None:
        """From now on, rows may name the adapter by this number, which is above 0.

        Raises ValueError, one line, naming the module that does not fit the model.
        """


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of keys and values, which a runner copies out of its slots and back with the same bits.

    `bytes`: of a page, the features that a head reads included. `format`: what a page's bits depend on, besides the
    weights and the number format; another process has the same pages if it says the same. `store(pages)` allocates
    memory for so many.
    """

    bytes: int
    format: str
    store: Callable[[int], PageStore]


@dataclass(frozen=True, slots=True)
class MemoryOnDemand:
    """KV slots that take memory as they are written, not all of it from the start; none has any after `warm_up`.

    A slot is whole in addresses, so that steps read it as ever; the system gives its pages when they are first written.
    `spare_bytes`: most bytes that steps take besides those of their rows' slots, for padding. `kv_bytes(tokens)`: most
    bytes of a slot whose sequence never has more tokens, drafts included. `give_back(slot, tokens)` gives back the
    memory beyond that, or all of it for 0 tokens; on the device thread.
    """

    spare_bytes: int
    kv_bytes: Callable[[int], int]
    give_back: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class FeaturesOut:
    """Hidden states of a target of so many layers and units.

    From `hand_out(layers)` on, every step writes those after so many layers to what it returns. The steps' results stay
    the same to the bit. Call it once, on the device thread; it raises ValueError, one line, if these steps cannot.
    """

    layer_count: int
    hidden_size: int
    hand_out: Callable[[Sequence[int]], HandedOut]


@dataclass(frozen=True, slots=True)
class FeaturesIn:
    """What a head reads whose target is elsewhere: hidden states of `target_hidden_size` after so many `layers`.

    `weights_revision_read`: of the target's weights that its embedding is from; empty if it has its own. From
    `follow(slot, inbox)` on, the slot's sequence has the features that come to the inbox.
    """

    layers: tuple[int, ...]
    target_hidden_size: int
    weights_revision_read: str
    follow: Callable[[int, FeatureInbox], None]


Fuse = Callable[["Runner", "Startup"], None]
Yes = Literal[True]
UNABLE = No("its steps cannot")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runner can do; final once `warm_up` has returned and features are handed out, if they are.

    logits: they come to the host, for sampling and all that is asked of them. structures: they can be masked.
    copied_drafts: it verifies drafts that a lookup copied. proposals: as a draft, it serves targets in other processes.
    fuse: makes one graph of a pair's round if it can, at startup, on the device thread; `fused_with` returns it
    afterwards. reprocess_accepted: a draft's accepted tokens are fed again, because what it cached for them came
    from its own guesses. shared_steps: a step takes as long as its tokens do, and `verify` takes PrefillRows last.
    """

    traits: frozenset[Trait] = frozenset()
    pages: Pages | No = UNABLE
    adapters: TakesAdapters | No = UNABLE
    memory_on_demand: MemoryOnDemand | No = UNABLE
    features_out: FeaturesOut | No = UNABLE
    features_in: FeaturesIn | No = UNABLE
    fuse: Fuse | No = UNABLE
    logits: Yes | No = True
    structures: Yes | No = True
    copied_drafts: Yes | No = True
    proposals: Yes | No = True
    reprocess_accepted: bool = False
    shared_steps: bool = False

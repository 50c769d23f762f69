"""A runner's abilities beyond the Runner protocol; tandem/engine/compatibility.py says which exclude each other."""

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


class TakesAdapters(Protocol):
    """LoRA adapters, by row; rows of different adapters share steps.

    A row has the same bits in every batch; rows without an adapter have those of a runner without adapters.
    """

    def put_adapter(self, number: int, adapter: Adapter) -> None:
        """Registers the adapter as `number` (above 0). Raises ValueError, one line, for a module that does not fit."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Copies of pages of keys and values, with the same bits.

    `bytes`: per page, features included. `format`: equal in processes whose pages have the same bits. `store(pages)`
    allocates memory for that number of pages.
    """

    bytes: int
    format: str
    store: Callable[[int], PageStore]


@dataclass(frozen=True, slots=True)
class MemoryOnDemand:
    """KV slots that take memory as they are written; none has any after `warm_up`.

    `spare_bytes`: maximum outside the rows' slots, for padding. `kv_bytes(tokens)`: maximum for a slot with that many
    tokens, drafts included. `give_back(slot, tokens)` frees memory beyond `tokens`; on the device thread.
    """

    spare_bytes: int
    kv_bytes: Callable[[int], int]
    give_back: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class FeaturesOut:
    """A target's hidden states.

    After `hand_out(layers)`, every step also writes the states after those layers to the result. Call it once, on the
    device thread. Raises ValueError, one line, if these steps cannot.
    """

    layer_count: int
    hidden_size: int
    hand_out: Callable[[Sequence[int]], HandedOut]


@dataclass(frozen=True, slots=True)
class FeaturesIn:
    """A remote head's input: hidden states of size `target_hidden_size` after `layers`.

    `weights_revision_read`: the target whose embedding the head uses; empty: its own. `follow(slot, inbox)` connects a
    slot to its incoming features.
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
    """Final once `warm_up` has returned and features are handed out.

    logits: available on the host. structures: logits can be masked. copied_drafts: verifies lookup drafts. proposals:
    drafts for targets in other processes. fuse: makes a pair's graph at startup, on the device thread, for
    `fused_with`. reprocess_accepted: the engine feeds accepted drafts again, since their cache entries are guesses.
    shared_steps: a step's time is that of its tokens, and `verify` takes PrefillRows last.
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

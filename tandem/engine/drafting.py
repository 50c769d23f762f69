"""Loads a drafter without a target: a draft model or n-gram lookup, and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from tandem.checkpoints.tokenizers import Tokenizer
from tandem.engine.batcher import Batcher
from tandem.engine.compatibility import refusal
from tandem.engine.generators import default_length, draft_name, drafter_health, make_drafter, rehearsals, tolerance
from tandem.engine.loading import Loaded, load_adapters, load_draft, load_target_tokenizer
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.capabilities import FeaturesIn, No
from tandem.runners.startup import Startup
from tandem.speculation.drafters import BonusDrafter
from tandem.speculation.fallible import DrafterHealth
from tandem.speculation.features import FeatureInbox
from tandem.speculation.types import ModelInfo, Request, SpeculationStats


@dataclass(frozen=True, slots=True)
class Drafting:
    """`draft`: None for n-gram lookup."""

    draft: Loaded | None
    tokenizer: Tokenizer
    choice: DraftChoice
    health: DrafterHealth = field(default_factory=partial(drafter_health, None))

    @property
    def name(self) -> str:
        return draft_name(self.draft, self.choice)

    @property
    def head(self) -> FeaturesIn | None:
        reads = self.draft.engine.can.features_in if self.draft else None
        return None if isinstance(reads, No) else reads

    def without_head(self) -> Drafting:
        """Lookup, for requests without features."""
        return replace(self, draft=None, choice=replace(self.choice, kind="ngram", model=None))

    @property
    def vocab_size(self) -> int:
        """Upper bound of token ids in calls."""
        return self.draft.runner.limits.vocab_size if self.draft else self.tokenizer.vocab_size

    def drafter(
        self,
        request: Request,
        vocab_size: int,
        slot_seconds: float | None = None,
        stats: SpeculationStats | None = None,
        inbox: FeatureInbox | None = None,
    ) -> BonusDrafter:
        """A drafter for one request, with token ids below `vocab_size`; with `stats`, failures only count."""
        tolerate = None if stats is None else tolerance(self.health, stats)
        return make_drafter(self.draft, request, vocab_size, self.choice, slot_seconds, tolerate, inbox)


async def load_drafting(config: ModelConfig, batcher: Batcher, startup: Startup | None = None) -> Drafting:
    """Loads the drafter, alone on `batcher`'s device thread. Raises ValueError, one line."""
    draft = await load_draft(config, batcher, startup)
    await load_adapters(config, None, draft)
    tokenizer = draft.tokenizer if draft else await load_target_tokenizer(config)
    return Drafting(draft, tokenizer, config.draft, drafter_health(draft))


def check_has_target(drafting: Drafting) -> None:
    """Raises ValueError for a draft that cannot serve remote targets."""
    if drafting.draft and isinstance(why := drafting.draft.engine.can.proposals, No):
        raise refusal("draft", drafting.name, "proposals", why)


def drafting_info(drafting: Drafting, config: ModelConfig) -> ModelInfo:
    """The ModelInfo of a DraftWorker: no target model, its own limits."""
    identity = drafting.draft.runner.identity if drafting.draft else None
    shape = drafting.draft.runner.limits if drafting.draft else config.shape
    return ModelInfo(
        model_name="",
        weights_revision="",
        tokenizer_sha256=drafting.tokenizer.sha256,
        vocab_size=drafting.vocab_size,
        max_sequence_length=shape.max_length,
        max_speculation_length=shape.max_draft,
        kv_slots=shape.slots,
        dtype=identity.dtype if identity else "",
        device=identity.device if identity else "",
        backend=config.backend,
        draft_name=drafting.name,
        default_speculation_length=default_length(config.default_k, shape.max_draft),
        adaptive_speculation_length=config.default_k is None,
        rehearsals=rehearsals(drafting.draft),
    )

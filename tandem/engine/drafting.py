"""What drafts, without a target: a model or n-gram lookup, and the tokenizer whose ids it speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from tandem.checkpoints.tokenizers import Tokenizer
from tandem.engine.batcher import Batcher
from tandem.engine.generators import default_length, draft_name, drafter_health, make_drafter
from tandem.engine.loading import DraftChoice, Loaded, ModelConfig, load_draft, own_tokenizer
from tandem.engine.slots import NoFreeSlot
from tandem.runners.protocol import RowFailed
from tandem.runners.startup import Startup
from tandem.speculation.drafters import Guesser
from tandem.speculation.fallible import DrafterHealth, FallibleGuesser
from tandem.speculation.types import DraftLimit, ModelInfo, Rule, SpeculationStats


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft model ready to run, or None where n-gram lookup drafts."""

    draft: Loaded | None
    tokenizer: Tokenizer
    choice: DraftChoice
    health: DrafterHealth = field(default_factory=partial(drafter_health, None))

    @property
    def name(self) -> str:
        return draft_name(self.draft, self.choice)

    @property
    def vocab_size(self) -> int:
        """Token ids that may be asked about are below it."""
        return self.draft.runner.limits.vocab_size if self.draft else self.tokenizer.vocab_size

    def drafter(
        self,
        vocab_size: int,
        rule: Rule = Rule.AGREEMENT,
        slot_seconds: float | None = None,
        limit: DraftLimit | None = None,
        stats: SpeculationStats | None = None,
    ) -> Guesser:
        """For one request, proposing token ids below `vocab_size`. After `slot_seconds` without a slot `open` raises
        NoFreeSlot; None: it waits.

        With `stats` a model that fails leaves rounds undrafted, which are counted there; without, it raises.
        """

        def fails_softly(model: Guesser) -> Guesser:
            return model if stats is None else FallibleGuesser(model, self.health, stats, (RowFailed, NoFreeSlot))

        return make_drafter(self.draft, vocab_size, self.choice, rule, slot_seconds, limit, fails_softly)


async def load_drafting(config: ModelConfig, batcher: Batcher, startup: Startup | None = None) -> Drafting:
    """Loads what drafts, with `batcher`'s device thread to itself. Raises ValueErrors of one line."""
    draft = await load_draft(config, batcher, alone=True, startup=startup)
    tokenizer = draft.tokenizer if draft else await own_tokenizer(config)
    return Drafting(draft, tokenizer, config.draft, drafter_health(draft))


def drafting_info(drafting: Drafting, config: ModelConfig) -> ModelInfo:
    """What a DraftWorker that knows no target says: no target model, and its own limits."""
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
    )

"""Makes the drafter of a draft model, in its own vocabulary or another, and lets it fail."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tandem.checkpoints.tokenizers import Tokenizer
from tandem.engine.head_sequences import HeadSequence
from tandem.engine.model_config import DraftChoice
from tandem.engine.model_drafter import DraftSequence, ModelDrafter
from tandem.engine.slots import NoFreeSlot
from tandem.runners.protocol import RowFailed
from tandem.speculation.drafters import BonusDrafter
from tandem.speculation.fallible import DrafterHealth, FallibleBonusDrafter
from tandem.speculation.features import FeatureInbox
from tandem.speculation.types import Request, SpeculationStats
from tandem.vocabularies.drafter import ForeignDrafter
from tandem.vocabularies.reading import translated

if TYPE_CHECKING:
    from tandem.engine.loading import Loaded


def foreign(draft: Loaded | None, choice: DraftChoice, target: Tokenizer) -> Loaded | None:
    """Returns the draft as one for the tokens of `target`, if it may have others. Raises ValueError."""
    if draft is None or not choice.foreign:
        return draft
    return replace(draft, tokenizer=target, translation=translated(target, draft.tokenizer))


def model_drafter(
    draft: Loaded, request: Request, vocab_size: int, slot_seconds: float | None, inbox: FeatureInbox | None
) -> BonusDrafter:
    """Returns a drafter for one request of a target with `vocab_size` tokens.

    `slot_seconds`: see ModelDrafter. `inbox`: of the features that a head reads.
    """
    begin = functools.partial(HeadSequence, inbox) if inbox else DraftSequence
    engine, limits = draft.engine, draft.runner.limits
    if draft.translation is None:
        return ModelDrafter(engine, request, vocab_size, slot_seconds, begin)

    def own(request: Request) -> BonusDrafter:
        return ModelDrafter(engine, request, limits.vocab_size, slot_seconds, begin)

    return ForeignDrafter(draft.translation, own, request, vocab_size, limits.max_length)


def tolerance(health: DrafterHealth, stats: SpeculationStats) -> Callable[[BonusDrafter], BonusDrafter]:
    """Returns what lets a model that fails leave rounds undrafted, which are counted in `stats`."""
    return lambda model: FallibleBonusDrafter(model, health, stats=stats, refusals=(RowFailed, NoFreeSlot))

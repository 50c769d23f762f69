"""Builds generators: the target alone, with any drafter, or fused with its draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tandem.checkpoints.tokenizers import Tokenizer, same_tokens
from tandem.engine.batcher import Batcher
from tandem.engine.compatibility import refusal
from tandem.engine.engine import Engine
from tandem.engine.fused_rounds import FusedPair, FusedRounds
from tandem.engine.generator import Generator
from tandem.engine.load_models import Loaded, Pair, load_adapters, load_draft, load_target_tokenizer
from tandem.engine.local_run import LocalRunVerifier, UndraftedRounds
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.engine.model_drafter import DraftSequence, HeadSequence, ModelDrafter
from tandem.engine.sequences import LocalVerifier
from tandem.engine.slots import NoFreeSlot
from tandem.runners.capabilities import FeaturesIn, No, Trait
from tandem.runners.protocol import RowFailed
from tandem.runners.startup import Startup
from tandem.speculation.drafters import Drafter, NgramDrafter, PredictionDrafter
from tandem.speculation.estimate import Estimate
from tandem.speculation.fallible import DrafterHealth, FallibleDrafter
from tandem.speculation.features import FeatureInbox
from tandem.speculation.length import FIRST
from tandem.speculation.lookup_policy import HybridDrafter, PolicedLookup
from tandem.speculation.loop import Rounds
from tandem.speculation.never_waiting import DraftsElsewhere, NeverWaitingRounds
from tandem.speculation.request import Drafts
from tandem.speculation.rounds import DraftedRounds
from tandem.speculation.types import (
    GenerationRequest,
    InvalidField,
    ModelInfo,
    Rehearsal,
    Request,
    Rule,
    SpeculationStats,
)
from tandem.speculation.verification_mode import ChosenRounds, LookaheadPolicy, Pipeline, never_waits


def target_info(loaded: Loaded, default_k: int | None, draft: str = "") -> ModelInfo:
    identity, limits, shapes = loaded.runner.identity, loaded.runner.limits, loaded.runner.shapes
    ends = {*identity.end_of_sequence_ids, *loaded.tokenizer.end_of_sequence_ids}
    features = loaded.engine.features
    return ModelInfo(
        model_name=identity.model_name,
        weights_revision=identity.weights_revision,
        tokenizer_sha256=loaded.tokenizer.sha256,
        vocab_size=limits.vocab_size,
        max_sequence_length=limits.max_length,
        max_speculation_length=limits.max_draft,
        kv_slots=limits.slots,
        dtype=identity.dtype,
        device=identity.device,
        backend=identity.backend,
        draft_name=draft,
        default_speculation_length=default_length(default_k, limits.max_draft),
        adaptive_speculation_length=default_k is None,
        plain_width=shapes.width(1),
        bit_exact=shapes.bit_exact,
        end_of_sequence_ids=tuple(sorted(ends)),
        feature_layers=features.layers if features else (),
        feature_size=features.hidden_size if features else 0,
        rehearsals=rehearsals(loaded),
        arithmetic=loaded.engine.arithmetic,
    )


def rehearsals(*models: Loaded | None) -> tuple[Rehearsal, ...]:
    """Returns the models that take another device's step times."""
    found = (model.runner.identity.rehearsal for model in models if model)
    return tuple(each for each in found if each)


def default_length(default_k: int | None, most: int) -> int:
    """Returns the default draft length; if adaptive (None), a process's first."""
    return min(FIRST if default_k is None else default_k, most)


def plain_generator(loaded: Loaded) -> Generator:

    def rounds(request: GenerationRequest, stats: SpeculationStats) -> Rounds:
        if request.predicted:
            return predicted_rounds(loaded, replace(request, rule=Rule.AGREEMENT), stats, info)
        check_drafts(request, ())
        verifier = LocalVerifier(loaded.engine, replace(request.of_models, rule=Rule.AGREEMENT), stats)
        return UndraftedRounds(verifier, None if request.stop_strings else stop_tokens(request, info))

    info = target_info(loaded, 0)
    return Generator(info, loaded.tokenizer, rounds, speculates=False)


def drafted_generator(
    target: Loaded,
    default_k: int | None,
    name: str,
    drafter: Callable[[GenerationRequest, SpeculationStats, Estimate], Drafter],
    pipeline: Pipeline,
    elsewhere: Callable[[GenerationRequest, SpeculationStats], DraftsElsewhere] | None = None,
) -> Generator:
    """Builds a generator with a drafter called `name` per request; `elsewhere` drafts for a target that never waits."""
    info, estimate = target_info(target, default_k, name), Estimate()
    most = info.max_speculation_length

    def rounds(request: GenerationRequest, stats: SpeculationStats) -> Rounds:
        if request.predicted:
            return predicted_rounds(target, request, stats, info)
        check_drafts(request, drafts_named(name))
        fixed, stops = fixed_length(request, info), None if request.stop_strings else stop_tokens(request, info)
        verifier = LocalVerifier(target.engine, request.of_models, stats)
        if fixed == 0 and not request.drafts_sample:
            return UndraftedRounds(verifier, stops)
        drafts = drafter(request, stats, estimate)
        copies = request.drafts in (Drafts.AUTO, Drafts.LOOKUP) and Drafts.LOOKUP in drafts_named(name)
        # Copies are made here, where asking for them costs nothing
        here = HybridDrafter(PolicedLookup(target.estimate), drafts) if copies else drafts
        waiting = DraftedRounds(verifier, here, stats=stats)
        if pipeline in (Pipeline.OFF, Pipeline.ON) or request.rule is not Rule.AGREEMENT:
            return waiting
        lookahead = LookaheadPolicy(most, estimate, fixed)
        if never_waits(pipeline, most, estimate) and lookahead.rests():
            lookup = PolicedLookup(target.estimate, only_grows=True) if copies else None
            return UndraftedRounds(verifier, stops, most, lookup)
        running = NeverWaitingRounds(
            LocalRunVerifier(verifier, target.estimate, stop_tokens(request, info)),
            drafts,
            lookahead,
            stats,
            request.max_total_tokens or info.max_sequence_length,
            max(1, most),
            request.max_new_tokens,
            measures=False,
            elsewhere=elsewhere(request, stats) if elsewhere else None,
            copies=copies,
        )

        runs = partial(never_waits, pipeline, lookahead.most, estimate)
        return ChosenRounds(partial(_open, verifier), runs, waiting, running, lookahead, measures_steps=True)

    return Generator(info, target.tokenizer, rounds, estimate=estimate)


async def _open(verifier: LocalVerifier, prompt: Sequence[int]) -> bool:
    await verifier.open(prompt)
    return False  # it does not run yet


def predicted_rounds(target: Loaded, request: GenerationRequest, stats: SpeculationStats, info: ModelInfo) -> Rounds:
    """Returns rounds for which only the request's prediction drafts."""
    verifier = LocalVerifier(target.engine, request.of_models, stats)
    if request.drafts_sample:
        return DraftedRounds(verifier, PredictionDrafter(request.predicted), stats=stats)
    drafter = PredictionDrafter(request.predicted, only_grows=True)
    widest = max(info.max_speculation_length, widest_step(target.engine) - 1)
    most = widest if request.speculation_length is None else request.speculation_length
    stops = None if request.stop_strings else stop_tokens(request, info)
    return UndraftedRounds(verifier, stops, most, PolicedLookup(target.estimate, prediction=drafter))


def widest_step(engine: Engine) -> int:
    """Returns the tokens of a row in one step: without padding a draft may be as wide as a prompt's chunk."""
    limits = engine.runner.limits
    return max(limits.chunk if engine.runner.shapes.ragged else 0, limits.max_draft + 1)


def fixed_length(request: GenerationRequest, info: ModelInfo) -> int | None:
    """Returns a round's draft tokens; None: adaptive."""
    if request.speculation_length is not None:
        return request.speculation_length
    return None if info.adaptive_speculation_length else info.default_speculation_length


def stop_tokens(request: GenerationRequest, info: ModelInfo) -> set[int]:
    ends = () if request.ignore_end_of_sequence else info.end_of_sequence_ids
    return {*ends, *request.stop_token_ids}


def draft_name(draft: Loaded | None, choice: DraftChoice) -> str:
    if draft is None:
        return "ngram"
    name = draft.runner.identity.model_name
    return name if choice.kind in ("model", "eagle") else f"ngram+{name}"


def drafts_of(draft: Loaded | None, choice: DraftChoice) -> tuple[Drafts, ...]:
    """Returns a request's choices of drafts, besides auto and none."""
    if draft is None:
        return (Drafts.LOOKUP,)
    model = Drafts.HEAD if is_head(draft) else Drafts.MODEL
    return (model,) if choice.kind in ("model", "eagle") else (Drafts.LOOKUP, model)


def drafts_for(request: Request, draft: Loaded | None) -> Loaded | None:
    """Returns the request's draft model; None with an adapter, which heads were trained without."""
    return None if draft and request.adapter and is_head(draft) else draft


def is_head(draft: Loaded) -> bool:
    return Trait.HEAD in draft.engine.can.traits


def drafts_named(name: str) -> tuple[Drafts, ...]:
    """Like `drafts_of`, for a DraftWorker's `name`; until it answers, its address allows lookup and model."""
    name = name.removeprefix("remote:")
    if name == "ngram":
        return (Drafts.LOOKUP,)
    return (Drafts.LOOKUP, Drafts.MODEL) if name.startswith("ngram+") or ":" in name else (Drafts.MODEL,)


def check_drafts(request: Request, there: tuple[Drafts, ...]) -> None:
    """Raises InvalidField for a choice that is not `there`."""
    choices = (Drafts.AUTO, Drafts.NONE, *there)
    if request.drafts not in choices:
        names = ", ".join(each.value for each in choices)
        raise InvalidField("drafts", f"{request.drafts.value} is not available: this server has {names}")


def fused_generator(
    target: Loaded,
    draft: Loaded | None,
    default_k: int | None,
    choice: DraftChoice,
    health: DrafterHealth | None = None,
    unfused: Pair | None = None,
) -> Generator:
    """Builds a generator that drafts by a model in the target's step, lookup, or both. Raises ValueError.

    `unfused`: the same models apart, for requests that the fused graph cannot answer.
    """
    if draft is not None:
        same_tokens(draft.tokenizer, target.tokenizer.sha256)
        if isinstance(draft.engine.can.copied_drafts, No):
            choice = replace(choice, kind="model")
    # Shared by all requests: rows can share steps only of the same pair, and the health of the draft is common.
    health = health or drafter_health(draft)
    pair = FusedPair(target.engine, draft.engine, health) if draft else None

    def rounds(request: GenerationRequest, stats: SpeculationStats) -> Rounds:
        if request.predicted:
            if draft and isinstance(why := draft.engine.can.copied_drafts, No):
                raise InvalidField("prediction", f"this server takes none: {why}")
            return predicted_rounds(target, request, stats, info)
        mine = drafts_for(request, draft)
        check_drafts(request, drafts_of(mine, choice))
        if mine and not request.models_draft and not isinstance(mine.engine.can.copied_drafts, No):
            mine = None  # its part of the prompt is not computed
        stops = None if request.stop_strings else stop_tokens(request, info)
        if pair and mine:
            lookup = choice.lookup(target.estimate, only_grows=True) if request.drafts is Drafts.AUTO else None
            return FusedRounds(pair, request.of_models, lookup, stats, stops)
        verifier = LocalVerifier(target.engine, request.of_models, stats)
        if mine is None and not request.drafts_sample:
            most = info.max_speculation_length if (k := fixed_length(request, info)) is None else k
            return UndraftedRounds(verifier, stops, most, PolicedLookup(target.estimate, only_grows=True))
        drafter = make_drafter(mine, request.of_models, info.vocab_size, choice, None, tolerance(health, stats))
        return DraftedRounds(verifier, drafter, stats=stats)

    fallback = None
    if unfused is not None:
        apart = fused_generator(*unfused, default_k, replace(choice, kind="model"))
        fallback = replace(apart, placement="apart")
    info = target_info(target, default_k, draft_name(draft, choice))
    info = replace(info, rehearsals=rehearsals(target, draft))
    return Generator(info, target.tokenizer, rounds, fallback=fallback, answers=target.engine.answers)


def drafter_health(draft: Loaded | None) -> DrafterHealth:
    return DrafterHealth(f"model {draft.runner.identity.model_name} of this process" if draft else "of this process")


def make_drafter(
    draft: Loaded | None,
    request: Request,
    target_vocab_size: int,
    choice: DraftChoice,
    slot_seconds: float | None = None,
    tolerate_failures: Callable[[Drafter], Drafter] | None = None,
    inbox: FeatureInbox | None = None,
) -> Drafter:
    """Returns one request's drafter; its `open` raises NoFreeSlot after `slot_seconds` (None: waits)."""
    draft = drafts_for(request, draft)
    away = draft is not None and not isinstance(draft.engine.can.features_in, No)
    if away and inbox is None and request.models_draft:
        draft = None  # a head elsewhere needs features: lookup drafts
    check_drafts(request, drafts_of(draft, choice))
    if draft is None or not request.models_draft:
        return NgramDrafter()
    begin = partial(HeadSequence, inbox) if inbox else DraftSequence
    model: Drafter = ModelDrafter(draft.engine, request, target_vocab_size, slot_seconds, begin)
    model = tolerate_failures(model) if tolerate_failures else model
    lookup = choice.lookup(draft.estimate) if request.drafts is Drafts.AUTO else None
    return model if lookup is None else HybridDrafter(lookup, model)


def tolerance(health: DrafterHealth, stats: SpeculationStats) -> Callable[[Drafter], Drafter]:
    """Returns a wrapper for models that fail: rounds go undrafted, counted in `stats`."""
    return lambda model: FallibleDrafter(model, health, stats=stats, refusals=(RowFailed, NoFreeSlot))


def worker_info(target: ModelInfo, draft: Loaded | None, config: ModelConfig) -> ModelInfo:
    """Returns a remote target's info with the drafter here."""
    return replace(
        target,
        draft_name=draft_name(draft, config.draft),
        default_speculation_length=default_length(config.default_k, target.max_speculation_length),
        adaptive_speculation_length=config.default_k is None,
        kv_slots=config.shape.slots,
        rehearsals=rehearsals(draft),
    )


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
    ) -> Drafter:
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

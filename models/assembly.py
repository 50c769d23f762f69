"""Puts a role's models together: checkpoints, tokenizers, engines on their device threads, and what drafts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from models.batcher import Batcher
from models.checkpoints import Checkpoint, CheckpointError, embedded_draft, find
from models.engine import Engine, LocalVerifier, ModelDrafter
from models.fused_rounds import FusedPair, FusedRounds
from models.generator import Generator
from models.gguf_cache import unpacked
from models.loading import CHUNK, Execution, Shape, load_runner, transformers_logging
from models.nxdi.fused import FusedDraft
from models.nxdi.here import require_nxdi
from models.nxdi.settings import NxdiSettings
from models.platforms import chosen
from models.runner import Fuses, Limits, Runner
from models.startup import Startup
from models.tensor_parallel import DRAFT, TARGET, Leader, Link, Ranks
from models.tokenizers import HuggingFaceTokenizer, Tokenizer
from models.toy import ToyConfig, ToyRunner, ToyTokenizer
from speculation.drafters import Drafter, Guesser, NgramDrafter
from speculation.fallible import DrafterHealth
from speculation.hybrid import HybridDrafter
from speculation.length import FIRST
from speculation.loop import DraftThenVerify, Rounds
from speculation.trust import Trust, TrustedLookup
from speculation.types import DraftLimit, GenerationRequest, ModelInfo, Rule, SpeculationStats

BACKENDS = ("torch", "nxdi", "toy")
DRAFTS = ("auto", "hybrid", "model", "ngram")


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What drafts: "ngram" lookup, a "model" (`model` names it), or "hybrid": lookup first, else the model.

    "auto" is hybrid where a model is named, or the target is the embedded one and its draft is shipped; else ngram.
    """

    kind: str = "auto"
    model: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in DRAFTS:
            raise ValueError(f"draft: {self.kind!r} is not one of {', '.join(DRAFTS)}")
        if self.kind == "ngram" and self.model:
            raise ValueError("draft: ngram needs no draft_model; leave one of the two out")

    def resolve(self, target: str | None = None) -> str | None:
        """The draft model's checkpoint for `target`, or None for n-gram lookup. Raises CheckpointError."""
        if self.kind == "ngram" or (self.kind == "auto" and target is not None and self.model is None):
            return None
        model = self.model or embedded_draft()
        if model is None and self.kind in ("model", "hybrid"):
            raise CheckpointError("draft: no draft model is shipped; name one with --draft_model, or use --draft ngram")
        return model

    def lookup(self, trust: Trust) -> TrustedLookup | None:
        """The lookup that goes before the draft model in one request, if one does."""
        return None if self.kind == "model" else TrustedLookup(trust)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which models a role runs, on what, in which shape. `nxdi`: what only that backend is told.

    `default_k` draft tokens where a request does not say; None: as many as pay, by measurement.
    """

    execution: Execution = field(default_factory=Execution)
    shape: Shape = field(default_factory=Shape)
    model: str | None = None
    draft: DraftChoice = field(default_factory=DraftChoice)
    backend: str = "torch"
    default_k: int | None = 3
    nxdi: NxdiSettings = field(default_factory=NxdiSettings)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend: {self.backend!r} is not one of {', '.join(BACKENDS)}")
        if self.nxdi.given and self.backend != "nxdi":
            raise ValueError("neuron_config, draft_neuron_config and eagle need --backend nxdi")
        if self.backend == "torch":
            _ = self.ranks

    @property
    def ranks(self) -> Ranks:
        """This process among those that share the target. Raises ValueError."""
        return Ranks.here(self.execution.tp_degree)

    @property
    def draft_model(self) -> str | None:
        """The draft model's checkpoint, or None where n-gram lookup drafts."""
        return self.draft.model if self.backend == "toy" else self.draft.resolve(self.model)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, with its tokenizer."""

    engine: Engine
    tokenizer: Tokenizer
    trust: Trust = field(default_factory=Trust)  # in it as a draft, and in copies beside it

    @property
    def runner(self) -> Runner:
        return self.engine.runner


async def load(config: ModelConfig, batcher: Batcher, startup: Startup | None = None) -> Loaded:
    """Loads and warms up the target on `batcher`'s device thread. Raises ValueErrors of one line.

    Where ranks share it, all of them do this, and the runner is a Leader.
    """
    shared = config.backend == "torch" and config.ranks.degree > 1
    link = await batcher.on_device(Link.join, chosen(config.execution.device), config.ranks) if shared else None
    return await _load(config, config.model, batcher, startup or Startup(), verifies=True, link=link)


async def load_draft(
    config: ModelConfig,
    batcher: Batcher,
    alone: bool = False,
    startup: Startup | None = None,
    link: Link | None = None,
) -> Loaded | None:
    """Loads the draft model likewise, or None where n-gram lookup drafts. `alone`: no target shares its thread."""
    model = config.draft_model
    return None if model is None else await _load(config, model, batcher, startup or Startup(), False, alone, link)


async def close(target: Loaded, batcher: Batcher) -> None:
    """Ends the device thread, and the ranks that follow where they are still there."""
    if isinstance(target.runner, Leader):
        with contextlib.suppress(RuntimeError):
            await batcher.on_device(target.runner.link.leave)
    await batcher.close()


async def load_pair(
    config: ModelConfig, batcher: Batcher, startup: Startup | None = None
) -> tuple[Loaded, Loaded | None]:
    """Target and draft on one device thread, and their fused step as one graph where the backend makes graphs."""
    startup = startup or Startup()
    if config.backend == "nxdi" and config.draft_model is not None:
        return await _load_nxdi_pair(config, config.draft_model, batcher, startup)
    target = await load(config, batcher, startup)
    link = target.runner.link if isinstance(target.runner, Leader) else None
    draft = await load_draft(config, batcher, startup=startup, link=link)
    if draft is not None and isinstance(target.runner, Fuses):
        await batcher.on_device(target.runner.fuse, draft.runner, startup)
    return target, draft


def _unpacked(model: str | None) -> Checkpoint:
    return unpacked(find(model))


async def _load(
    config: ModelConfig,
    model: str | None,
    batcher: Batcher,
    startup: Startup,
    verifies: bool,
    alone: bool = False,
    link: Link | None = None,
) -> Loaded:
    if config.backend == "toy":
        return Loaded(Engine(_toy(model, config.shape), batcher, vital=verifies), ToyTokenizer())
    if config.backend == "nxdi":
        require_nxdi()
    with startup.stage("finding weights"):
        checkpoint = await asyncio.to_thread(find if config.backend == "nxdi" else _unpacked, model)
    runner = await batcher.on_device(_load_warm, checkpoint, config, verifies, alone, startup)
    with startup.stage("tokenizer"):
        tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint)
    shared = runner if link is None else Leader(runner, link, TARGET if verifies else DRAFT)
    return Loaded(Engine(shared, batcher, vital=verifies), tokenizer)


async def _load_nxdi_pair(
    config: ModelConfig, draft_model: str, batcher: Batcher, startup: Startup
) -> tuple[Loaded, Loaded]:
    """Draft and target as one NxDI graph, seen as two engines."""
    from models.nxdi.assembly import load_nxdi_pair, start_on_device

    require_nxdi()
    if config.draft.kind == "hybrid":
        raise ValueError("draft: a fused nxdi graph verifies its own drafts alone, not copies; use --draft model")
    target, draft = find(config.model), find(draft_model)
    tokenizer = await asyncio.to_thread(load_tokenizer, target)
    if not config.nxdi.eagle:  # a head has none
        same_tokens(await asyncio.to_thread(load_tokenizer, draft), tokenizer.sha256)
    with startup.stage("loading"):
        runners = await batcher.on_device(
            load_nxdi_pair, target, draft, config.execution, config.shape, config.nxdi, start_on_device
        )
        await batcher.on_device(runners[0].warm_up, startup)
    target_engine, draft_engine = Engine(runners[0], batcher), Engine(runners[1], batcher, vital=False)
    return Loaded(target_engine, tokenizer), Loaded(draft_engine, tokenizer)


async def own_tokenizer(config: ModelConfig) -> Tokenizer:
    """The target's tokenizer without its weights: all that n-gram drafting needs."""
    if config.backend == "toy":
        return ToyTokenizer()
    return await asyncio.to_thread(load_tokenizer, find(config.model))


def load_tokenizer(checkpoint: Checkpoint) -> HuggingFaceTokenizer:
    transformers_logging()
    return HuggingFaceTokenizer(unpacked(checkpoint))


def _load_warm(checkpoint: Checkpoint, config: ModelConfig, verifies: bool, alone: bool, startup: Startup) -> Runner:
    runner = (
        _load_nxdi(checkpoint, config, verifies, startup)
        if config.backend == "nxdi"
        else load_runner(checkpoint, config.execution, config.shape, verifies, alone, startup)
    )
    runner.warm_up(startup)
    return runner


def _load_nxdi(checkpoint: Checkpoint, config: ModelConfig, verifies: bool, startup: Startup) -> Runner:
    from models.nxdi.assembly import load_nxdi, start_on_device

    with startup.stage("loading"):
        return load_nxdi(checkpoint, config.execution, config.shape, config.nxdi, verifies, start_on_device)


def _toy(model: str | None, shape: Shape) -> ToyRunner:
    """`model` may say "miss=0.3,step=0.01,salt=1,fails=100"."""
    values = dict(part.partition("=")[::2] for part in (model or "").split(",") if part)
    try:
        config = ToyConfig(
            int(values.pop("salt", 0)),
            float(values.pop("miss", 0)),
            float(values.pop("step", 0)),
            int(values.pop("fails", 0)),
        )
    except ValueError:
        values["unreadable"] = ""
    if values:
        raise ValueError(f"model: {model!r} is not a toy model; say for example miss=0.3,step=0.01,salt=1")
    return ToyRunner(Limits(shape.slots, shape.max_length, shape.max_draft, CHUNK, 258), config)


def target_info(loaded: Loaded, default_k: int | None, draft: str = "") -> ModelInfo:
    """GetModelInfo's answer for a loaded target."""
    identity, limits, shapes = loaded.runner.identity, loaded.runner.limits, loaded.runner.shapes
    ends = {*identity.end_of_sequence_ids, *loaded.tokenizer.end_of_sequence_ids}
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
    )


def default_length(default_k: int | None, most: int) -> int:
    """Where lengths adapt: the one that the first round of a process takes."""
    return min(FIRST if default_k is None else default_k, most)


def plain_generator(loaded: Loaded) -> Generator:
    """The target alone: plain decoding."""

    def rounds(request: GenerationRequest, stats: SpeculationStats, limit: DraftLimit) -> Rounds:
        return DraftThenVerify(LocalVerifier(loaded.engine, request.report_margins))

    return Generator(target_info(loaded, 0), loaded.tokenizer, rounds, speculates=False)


def drafted_generator(
    target: Loaded,
    default_k: int | None,
    name: str,
    drafter: Callable[[GenerationRequest, SpeculationStats, DraftLimit], Drafter],
) -> Generator:
    """The target, and whatever `drafter` makes for a request, called `name`. A length of 0 asks it for nothing."""
    info = target_info(target, default_k, name)

    def rounds(request: GenerationRequest, stats: SpeculationStats, limit: DraftLimit) -> Rounds:
        asked = request.speculation_length
        k = info.default_speculation_length if asked is None else asked
        verifier = LocalVerifier(target.engine, request.report_margins, request.rule)
        return DraftThenVerify(verifier, drafter(request, stats, limit) if k else None)

    return Generator(info, target.tokenizer, rounds)


def draft_name(draft: Loaded | None, choice: DraftChoice) -> str:
    if draft is None:
        return "ngram"
    name = draft.runner.identity.model_name
    return name if choice.kind == "model" else f"ngram+{name}"


def fused_generator(
    target: Loaded,
    draft: Loaded | None,
    default_k: int | None,
    choice: DraftChoice,
    health: DrafterHealth | None = None,
) -> Generator:
    """Draft beside the target: a model in the same step, n-gram lookup before it, or both. Raises ValueError."""
    if draft is not None:
        same_tokens(draft.tokenizer, target.tokenizer.sha256)
        if isinstance(draft.runner, FusedDraft):
            choice = replace(choice, kind="model")  # its graph verifies nothing but its own drafts
    # One for all: rows share steps that are the same, and what is known about the draft.
    pair = FusedPair(target.engine, draft.engine, health or drafter_health(draft)) if draft else None

    def rounds(request: GenerationRequest, stats: SpeculationStats, limit: DraftLimit) -> Rounds:
        if pair is not None and draft is not None:
            lookup = choice.lookup(draft.trust)
            return FusedRounds(pair, request.report_margins, lookup, request.rule, limit, stats)
        return DraftThenVerify(LocalVerifier(target.engine, request.report_margins, request.rule), NgramDrafter())

    return Generator(target_info(target, default_k, draft_name(draft, choice)), target.tokenizer, rounds)


def same_tokens(draft: Tokenizer, target_sha256: str) -> None:
    """Raises ValueError unless draft and target speak of the same ids."""
    if draft.sha256 != target_sha256:
        raise ValueError(
            f"draft_model: its tokenizer ({draft.sha256[:12]}) is not the target's ({target_sha256[:12]}); "
            "draft and target must share a vocabulary"
        )


def drafter_health(draft: Loaded | None) -> DrafterHealth:
    """What a process knows about its own draft model."""
    return DrafterHealth(f"model {draft.runner.identity.model_name} of this process" if draft else "of this process")


def make_drafter(
    draft: Loaded | None,
    target_vocab_size: int,
    choice: DraftChoice,
    rule: Rule = Rule.AGREEMENT,
    waits: bool = True,
    limit: DraftLimit | None = None,
    fails_softly: Callable[[Guesser], Guesser] | None = None,
) -> Guesser:
    """A drafter for one request, its model within `limit`.

    Without `waits`, its `open` raises NoFreeSlot where all slots are taken. `fails_softly` wraps the model, which alone
    can fail.
    """
    if draft is None:
        return NgramDrafter()
    model: Guesser = ModelDrafter(draft.engine, target_vocab_size, rule, waits, limit)
    model = fails_softly(model) if fails_softly else model
    lookup = choice.lookup(draft.trust)
    return model if lookup is None else HybridDrafter(lookup, model)


def worker_info(target: ModelInfo, draft: Loaded | None, config: ModelConfig) -> ModelInfo:
    """What a DraftWorker says: the target's facts, limited by the draft's."""
    longest = min(target.max_sequence_length, draft.runner.limits.max_length if draft else target.max_sequence_length)
    return replace(
        target,
        draft_name=draft_name(draft, config.draft),
        default_speculation_length=default_length(config.default_k, target.max_speculation_length),
        adaptive_speculation_length=config.default_k is None,
        max_sequence_length=longest,
        kv_slots=config.shape.slots,
    )

"""Loads the models of a role: checkpoints, tokenizers, engines on their device threads, and the draft choice."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import Checkpoint, CheckpointError, embedded_draft, find
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer, Tokenizer, same_tokens
from tandem.engine.batcher import CLOSE_SECONDS, Batcher
from tandem.engine.sequences import Engine
from tandem.runners.loading import CHUNK, Execution, Shape, load_runner, transformers_logging
from tandem.runners.nxdi.availability import require_nxdi
from tandem.runners.nxdi.settings import NxdiSettings
from tandem.runners.protocol import Fuses, Limits, Runner
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import chosen
from tandem.runners.torch.tensor_parallel import DRAFT, TARGET, Leader, Link, Ranks
from tandem.runners.toy import ToyConfig, ToyRunner, ToyTokenizer
from tandem.speculation.lookup_policy import LookupPolicy, PolicedLookup

BACKENDS = ("torch", "nxdi", "toy")
DRAFTS = ("auto", "hybrid", "model", "ngram")


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The kind of drafter: "ngram" lookup, a "model" (named by `model`), or "hybrid": lookup first, else the model.

    "auto" is hybrid if a model is named, or if the target is the embedded one and its draft is shipped; else ngram.
    """

    kind: str = "auto"
    model: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in DRAFTS:
            raise ValueError(f"draft: {self.kind!r} is not one of {', '.join(DRAFTS)}")
        if self.kind == "ngram" and self.model:
            raise ValueError("draft: ngram needs no draft_model; leave one of the two out")

    def resolve(self, target: str | None = None) -> str | None:
        """Returns the draft model's checkpoint for `target`, or None for n-gram lookup. Raises CheckpointError."""
        if self.kind == "ngram" or (self.kind == "auto" and target is not None and self.model is None):
            return None
        model = self.model or embedded_draft()
        if model is None and self.kind in ("model", "hybrid"):
            raise CheckpointError("draft: no draft model is shipped; name one with --draft_model, or use --draft ngram")
        return model

    def lookup(self, policy: LookupPolicy) -> PolicedLookup | None:
        """Returns the lookup used before the draft model in one request, or None if only the model drafts."""
        return None if self.kind == "model" else PolicedLookup(policy)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The models that a role runs, the backend and device, and their shape. `nxdi`: settings of that backend only.

    `default_k`: draft tokens if a request does not set a number; None: chosen by measurement.
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
        """The rank of this process and the number of ranks that share the target. Raises ValueError."""
        return Ranks.here(self.execution.tp_degree)

    @property
    def draft_model(self) -> str | None:
        """The draft model's checkpoint, or None if n-gram lookup drafts."""
        return self.draft.model if self.backend == "toy" else self.draft.resolve(self.model)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run, with its tokenizer and, as a draft, its acceptance rates and those of copies."""

    engine: Engine
    tokenizer: Tokenizer
    lookup_policy: LookupPolicy = field(default_factory=LookupPolicy)

    @property
    def runner(self) -> Runner:
        return self.engine.runner


async def load(config: ModelConfig, batcher: Batcher, startup: Startup | None = None) -> Loaded:
    """Loads and warms up the target on `batcher`'s device thread. Raises ValueError with a one-line message.

    If ranks share it, each of them calls this, and the runner is a Leader.
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
    """Loads and warms up the draft model; None if n-gram lookup drafts. `alone`: no target shares its thread."""
    model = config.draft_model
    return None if model is None else await _load(config, model, batcher, startup or Startup(), False, alone, link)


async def close(target: Loaded, batcher: Batcher) -> None:
    """Ends the device thread, and the ranks that follow if they still run."""
    if isinstance(target.runner, Leader):
        leaving = asyncio.ensure_future(batcher.on_device(target.runner.link.leave))
        try:
            left, _ = await asyncio.wait((leaving,), timeout=CLOSE_SECONDS)
        finally:
            leaving.cancel()
        if left:
            with contextlib.suppress(RuntimeError):
                leaving.result()
    await batcher.close()


async def load_pair(
    config: ModelConfig, batcher: Batcher, startup: Startup | None = None
) -> tuple[Loaded, Loaded | None]:
    """Loads target and draft on one device thread, and compiles their fused step if the backend compiles graphs."""
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
    """Loads draft and target as one NxDI graph, presented as two engines."""
    from tandem.runners.nxdi.load import load_nxdi_pair, start_on_device

    require_nxdi()
    if config.draft.kind == "hybrid":
        raise ValueError("draft: a fused nxdi graph verifies only its own drafts, not copies; use --draft model")
    target, draft = find(config.model), find(draft_model)
    tokenizer = await asyncio.to_thread(load_tokenizer, target)
    if not config.nxdi.eagle:  # an EAGLE head has no tokenizer
        same_tokens(await asyncio.to_thread(load_tokenizer, draft), tokenizer.sha256)
    with startup.stage("loading"):
        runners = await batcher.on_device(
            load_nxdi_pair, target, draft, config.execution, config.shape, config.nxdi, start_on_device
        )
        await batcher.on_device(runners[0].warm_up, startup)
    target_engine, draft_engine = Engine(runners[0], batcher), Engine(runners[1], batcher, vital=False)
    return Loaded(target_engine, tokenizer), Loaded(draft_engine, tokenizer)


async def own_tokenizer(config: ModelConfig) -> Tokenizer:
    """Loads the target's tokenizer without its weights, which n-gram drafting does not need."""
    if config.backend == "toy":
        return ToyTokenizer()
    return await asyncio.to_thread(load_tokenizer, find(config.model))


def load_tokenizer(checkpoint: Checkpoint) -> HuggingFaceTokenizer:
    """Loads a checkpoint's tokenizer."""
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
    from tandem.runners.nxdi.load import load_nxdi, start_on_device

    with startup.stage("loading"):
        return load_nxdi(checkpoint, config.execution, config.shape, config.nxdi, verifies, start_on_device)


def _toy(model: str | None, shape: Shape) -> ToyRunner:
    """Makes a toy model from settings such as "miss=0.3,step=0.01,salt=1,fails=100". Raises ValueError."""
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
        raise ValueError(f"model: {model!r} is not a toy model; use for example miss=0.3,step=0.01,salt=1")
    return ToyRunner(Limits(shape.slots, shape.max_length, shape.max_draft, CHUNK, 258), config)

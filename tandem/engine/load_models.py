"""Loads a role's models: checkpoints, tokenizers, engines on their device threads, and the draft choice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.checkpoints.locate import Checkpoint, CheckpointError
from tandem.checkpoints.tokenizers import Tokenizer, same_tokens
from tandem.engine.batcher import CLOSE_SECONDS, Batcher
from tandem.engine.compatibility import able, excluded, refusal
from tandem.engine.engine import Engine
from tandem.engine.model_config import ModelConfig
from tandem.engine.structures import Structures
from tandem.installing import check_installed
from tandem.runners.backends import Backend, LoadRequest, backend_named
from tandem.runners.capabilities import No, Trait
from tandem.runners.load_runner import prepared_platform
from tandem.runners.own_sizes import draft_shape
from tandem.runners.protocol import Runner
from tandem.runners.rehearsal import bare, rehearsed
from tandem.runners.startup import Startup
from tandem.runners.torch.tensor_parallel import DRAFT, TARGET, Leader, RankLink
from tandem.speculation.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, with its tokenizer and, as a draft, its acceptance rates."""

    engine: Engine
    tokenizer: Tokenizer
    estimate: Estimate = field(default_factory=Estimate)

    @property
    def runner(self) -> Runner:
        return self.engine.runner


Pair = tuple[Loaded, Loaded | None]  # target and draft


def check_found(config: ModelConfig) -> None:
    """Raises ValueError at once for a missing library or drafting model, before a server is called."""
    backend = backend_named(config.backend)
    backend.require()
    backend.find(config.draft_model or config.model)
    if config.backend == "torch":
        check_installed("model", "serve", "gguf", "safetensors", "tokenizers")


async def load(
    config: ModelConfig, batcher: Batcher, startup: Startup | None = None, head: Checkpoint | None = None
) -> Loaded:
    """Loads and warms up the target on `batcher`'s device thread, in every rank. Raises ValueError, one line."""
    shared = config.backend == "torch" and config.ranks.degree > 1
    if shared and head:
        raise excluded("draft", "an EAGLE head's target", Trait.SHARED, "features_out")
    link = None
    if shared:
        link = await batcher.on_device(lambda: RankLink.join(prepared_platform(config.execution), config.ranks))
    request = replace(config.load_request(), head=head)
    return await _load(config, config.model, request, batcher, startup or Startup(), link)


async def load_draft(
    config: ModelConfig, batcher: Batcher, startup: Startup | None = None, target: Loaded | None = None
) -> Loaded | None:
    """Loads and warms up the draft, next to `target` or alone; None for lookup. Raises ValueError, one line."""
    model, startup = config.draft_model, startup or Startup()
    if model is None:
        return None
    backend = backend_named(config.backend)
    backend.require()
    checkpoint = await asyncio.to_thread(backend.find, model)
    if backend.is_head(checkpoint):
        return await _load_head(config, backend, checkpoint, target, batcher, startup)
    if config.draft.kind == "eagle":
        raise CheckpointError(f"draft: eagle needs an EAGLE-3 head, and {checkpoint.name} is none; use --draft model")
    link = target.runner.link if target and isinstance(target.runner, Leader) else None
    request = config.load_request(verifies=False, sole_model=target is None)
    return await _load(config, model, request, batcher, startup, link)


async def _load_head(
    config: ModelConfig,
    backend: Backend,
    checkpoint: Checkpoint,
    target: Loaded | None,
    batcher: Batcher,
    startup: Startup,
) -> Loaded:
    request = config.load_request(verifies=False, sole_model=target is None)
    if target and isinstance(why := target.engine.can.features_out, No):
        raise refusal("draft", target.runner.identity.model_name, "features_out", why)
    beside = bare(target.runner) if target else await asyncio.to_thread(backend.find, config.model)
    runner = await batcher.on_device(backend.load_head, checkpoint, beside, request, startup)
    tokenizer = target.tokenizer if target else await load_target_tokenizer(config)
    await batcher.on_device(runner.warm_up, startup)
    if target:
        target.engine.can = able(target.runner)  # its features are read from now on
    return Loaded(Engine(rehearsed(runner, config.rehearsal, verifies=False), batcher, vital=False), tokenizer)


async def load_adapters(config: ModelConfig, target: Loaded | None, draft: Loaded | None = None) -> None:
    """Loads the adapters of target and draft, after a head. Raises ValueError, one line."""
    read = backend_named(config.backend).adapter
    if target:
        for choice in config.adapters:
            await target.engine.adapters.add(choice, read)
    for choice in config.draft_adapters:
        if draft is None:
            raise ValueError("draft_adapters: prompt lookup drafts, which takes none; name a --draft_model")
        if target and choice.name not in target.engine.adapters.revisions:
            raise ValueError(f"draft_adapters: the target has no adapter {choice.name}")
        try:
            await draft.engine.adapters.add(choice, read)
        except ValueError as error:
            raise ValueError(f"draft_adapters: {str(error).removeprefix('adapters: ')}") from None


async def close(target: Loaded, batcher: Batcher) -> None:
    """Ends the device thread and the other ranks."""
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


async def load_pair(config: ModelConfig, batcher: Batcher, startup: Startup | None = None) -> Pair:
    """Loads target and draft on one device thread, with their fused graph if the backend compiles graphs."""
    startup = startup or Startup()
    backend, request = backend_named(config.backend), config.load_request()
    if config.draft.kind == "eagle" and backend.loads_pairs:
        raise ValueError(f"draft: eagle is not of backend {config.backend}, whose heads are --draft model --eagle")
    if config.draft_model is not None and backend.loads_pairs:
        if backend.fuses(request):
            return await _load_as_one_graph(config, config.draft_model, batcher, startup)
        requests, tokenizer = backend.unfused(request), await load_target_tokenizer(config)
        return await _load_both_apart(config, requests, tokenizer, batcher, startup)
    target = await load(config, batcher, startup, await named_head(config))
    draft = await load_draft(config, batcher, startup, target)
    if draft and not isinstance(fuse := target.engine.can.fuse, No):
        await batcher.on_device(fuse, draft.runner, startup)
    return target, draft


async def named_head(config: ModelConfig) -> Checkpoint | None:
    # a target may need to know its head before it warms up; loading the draft reports if it is missing
    backend = backend_named(config.backend)
    with contextlib.suppress(CheckpointError):
        if model := config.draft_model:
            checkpoint = await asyncio.to_thread(backend.find, model)
            return checkpoint if backend.is_head(checkpoint) else None
    return None


async def _load(
    config: ModelConfig,
    model: str | None,
    request: LoadRequest,
    batcher: Batcher,
    startup: Startup,
    link: RankLink | None = None,
    tokenizer: Tokenizer | None = None,
) -> Loaded:
    backend, verifies = backend_named(config.backend), request.verifies
    backend.require()
    with startup.stage("finding weights"):
        checkpoint = await asyncio.to_thread(backend.find, model)
        if not verifies and config.backend == "torch":
            request = replace(request, shape=draft_shape(request.shape, checkpoint))
    runner = await batcher.on_device(backend.load, checkpoint, request, startup)
    await batcher.on_device(runner.warm_up, startup)
    if tokenizer is None:
        with startup.stage("tokenizer"):
            tokenizer = await asyncio.to_thread(backend.tokenizer, checkpoint)
    runner = rehearsed(runner, config.rehearsal, verifies)
    shared = runner if link is None else Leader(runner, link, TARGET if verifies else DRAFT)
    return Loaded(Engine(shared, batcher, verifies, _structures(shared, tokenizer)), tokenizer)


def _structures(runner: Runner, tokenizer: Tokenizer) -> Structures | None:
    if isinstance(able(runner).structures, No):
        return None
    return Structures(tokenizer, runner.limits.vocab_size, runner.identity.end_of_sequence_ids)


async def _load_as_one_graph(
    config: ModelConfig, draft_model: str, batcher: Batcher, startup: Startup
) -> tuple[Loaded, Loaded]:
    backend, request = backend_named(config.backend), config.load_request()
    backend.require()
    if config.draft.kind == "hybrid":
        raise excluded("draft", f"a fused {config.backend} graph", Trait.ONE_GRAPH, "copied_drafts")
    target, draft = backend.find(config.model), backend.find(draft_model)
    tokenizer = await asyncio.to_thread(backend.tokenizer, target)
    if backend.draft_has_tokenizer(request):
        same_tokens(await asyncio.to_thread(backend.tokenizer, draft), tokenizer.sha256)
    runners = await batcher.on_device(backend.load_pair, target, draft, request, startup)
    await batcher.on_device(runners[0].warm_up, startup)
    target_engine = Engine(runners[0], batcher, structures=_structures(runners[0], tokenizer))
    return Loaded(target_engine, tokenizer), Loaded(Engine(runners[1], batcher, vital=False), tokenizer)


async def load_unfused(
    config: ModelConfig, fused: Loaded, batcher: Batcher, startup: Startup | None = None
) -> Pair | None:
    """Loads a fused pair's models separately for requests that the graph rejects; None if there are none."""
    if config.draft_model is None or not isinstance(fused.engine.can.logits, No):
        return None
    requests = backend_named(config.backend).unfused(config.load_request())
    if not requests:
        return None
    apart = await _load_both_apart(config, requests, fused.tokenizer, batcher, startup or Startup())
    fused.engine.bind(apart[0].engine)
    return apart


async def _load_both_apart(
    config: ModelConfig, requests: Sequence[LoadRequest], tokenizer: Tokenizer, batcher: Batcher, startup: Startup
) -> Pair:
    backend = backend_named(config.backend)
    verifying, *drafting = requests
    target = await _load(config, config.model, verifying, batcher, startup, tokenizer=tokenizer)
    if not drafting:
        return target, None
    same_tokens(await asyncio.to_thread(backend.tokenizer, backend.find(config.draft_model)), tokenizer.sha256)
    draft = await _load(config, config.draft_model, drafting[0], batcher, startup, tokenizer=tokenizer)
    return target, draft


async def load_target_tokenizer(config: ModelConfig) -> Tokenizer:
    """The target's tokenizer without its weights, for n-gram drafting."""
    backend = backend_named(config.backend)
    return await asyncio.to_thread(lambda: backend.tokenizer(backend.find(config.model)))

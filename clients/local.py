"""Local client roles: distributed drafting and single models."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from tandem.checkpoints.tokenizers import ChatTokenizer
from tandem.checkpoints.tokenizers import Tokenizer as Tokenizer
from tandem.clients.completion import Events
from tandem.clients.distributed import connect_distributed
from tandem.clients.terminal import ClientConfig, run_prompts
from tandem.engine.batcher import Batcher
from tandem.engine.generators import load_drafting, plain_generator
from tandem.engine.load_models import check_found, load, load_adapters
from tandem.engine.model_config import ModelConfig
from tandem.rpc.channel import TARGET
from tandem.rpc.first_contact import check_peers
from tandem.runners.backends import backend_named
from tandem.speculation.types import GenerationRequest
from tandem.speculation.verification_mode import Pipeline


async def run_draft(
    config: ClientConfig, models: ModelConfig, connect_seconds: float, pipeline: Pipeline = Pipeline.AUTO
) -> int:
    check_found(models)
    await check_peers(config.address, config.credentials, TARGET)
    batcher = Batcher("draft")
    drafting = await load_drafting(models, batcher)
    generator, client = await connect_distributed(
        drafting, models, config.address, connect_seconds, pipeline, config.credentials, config.reconnect_seconds
    )

    def generate(request: GenerationRequest) -> Events:
        if config.timeout is not None:
            request = replace(request, deadline=time.monotonic() + config.timeout)
        return generator.generate(request)

    try:
        return await run_prompts(config, generate, "distributed")
    finally:
        await client.close()
        await batcher.close()


async def run_single_model(config: ClientConfig, models: ModelConfig, name: str) -> int:
    """Runs --role verify_target or verify_draft: plain decoding."""
    batcher = Batcher(name)
    try:
        loaded = await load(models, batcher)
        await load_adapters(models, loaded)
        config = replace(config, token_text=partial(token_text, loaded.tokenizer))
        return await run_prompts(config, plain_generator(loaded).generate, name)
    finally:
        await batcher.close()


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's own text; bytes of a part of a character are escaped."""
    assert isinstance(tokenizer, ChatTokenizer), "all of ours are"
    spelt = tokenizer.token_bytes(token)
    return spelt.decode(errors="backslashreplace") if spelt else tokenizer.text([token])


def target_tokenizer(backend: str, model: str | None) -> Tokenizer:
    """Returns a target's tokenizer; None: the default model's. Raises ValueError."""
    chosen = backend_named(backend)
    return chosen.tokenizer(chosen.find(model))

"""Requests with adapters on real steps: the same tokens and log-probabilities, cold or warm, alone or batched."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoints.adapter_files import AdapterChoice, read_adapter
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.engine.sequences import LocalVerifier
from tandem.runners.native.weights import UNQUANTISED, packing
from tandem.runners.pages import PAGE
from tandem.speculation.types import Request, SamplingParams, SpeculationStats
from tests.adapters import lora_tensors, write_adapter
from tests.daily import daily
from tests.runners.test_native import GREEDY, SLOTS, module_of, native, sequence
from tests.runners.test_quantised import WIDE
from tests.runners.test_torch_adapters import module as torch_module
from tests.runners.test_torch_adapters import runner_of
from tests.support import run

SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=7)
NAMES = ("", "red", "blue")


def runner_and_module(name: str) -> tuple[Any, Any]:
    if name == "torch, float32":
        return runner_of(torch.float32), torch_module("llama", torch.float32, False)
    packed = packing("int8") if "int8" in name else UNQUANTISED
    module = module_of(
        dtype=torch.bfloat16 if "bfloat16" in name else torch.float32, **(WIDE if "int8" in name else {})
    )
    runner = native(module, packing=packed)
    runner.warm_up()
    return runner, module


async def engine_of(runner: Any, folders: dict[str, Path]) -> Engine:
    engine = Engine(runner, Batcher("test"))
    for name, folder in folders.items():
        await engine.adapters.add(AdapterChoice(name, str(folder)), read_adapter)
    return engine


async def said(engine: Engine, name: str, prompt: list[int], sampling: SamplingParams) -> tuple[Any, int]:
    """Tokens and their log-probabilities, which show the logits' bits; and what was cached."""
    stats, tokens, logprobs = SpeculationStats(), list(prompt), list[Any]()
    verifier = LocalVerifier(engine, Request(sampling, logprobs=2, adapter=name), stats=stats)
    try:
        await verifier.open(tokens)
        for round_ in range(4):
            verdict = await verifier.verify(tokens, tokens[:round_])
            tokens += verdict.token_ids
            logprobs += verdict.logprobs
    finally:
        await verifier.close()
    return (tokens, logprobs), stats.cached_prompt_tokens


@pytest.mark.parametrize("name", daily(["native, float32", "native, bfloat16", "native, int8", "torch, float32"], 2, 3))
def test_what_a_request_says_depends_on_its_adapter_and_on_nothing_else(name: str, tmp_path: Path) -> None:
    runner, module = runner_and_module(name)
    folders = {
        each: write_adapter(tmp_path / each, lora_tensors(module, seed, names=names))
        for seed, (each, names) in enumerate(
            (("red", ("q_proj", "v_proj", "o_proj")), ("blue", ("up_proj", "down_proj")))
        )
    }
    prompt = [each % runner.limits.vocab_size for each in sequence(45)]

    async def test(sampling: SamplingParams) -> None:
        engine = await engine_of(runner, folders)
        cold = [(await said(engine, adapter, prompt, sampling))[0] for adapter in NAMES]
        assert len({str(each) for each in cold}) == len(NAMES)
        await share_prefixes([engine], PrefixSharing("all", 1), lambda: None)
        first = [await said(engine, adapter, prompt, sampling) for adapter in NAMES]
        warm = [await said(engine, adapter, prompt, sampling) for adapter in NAMES]
        assert [each[0] for each in (*first, *warm)] == cold * 2
        assert [each[1] for each in (*first, *warm)] == [0] * len(NAMES) + [2 * PAGE] * len(NAMES)
        for names in (NAMES, ("blue", "red", "blue"), ("red", "", "")):
            some = names[: min(SLOTS, runner.limits.slots)]
            together = await asyncio.gather(*(said(engine, adapter, prompt, sampling) for adapter in some))
            assert [each[0] for each in together] == [cold[NAMES.index(adapter)] for adapter in some]
        await engine.batcher.close()

    for sampling in (GREEDY, SAMPLED):
        run(test(sampling))

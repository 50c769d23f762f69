"""Tiny pairs for tests of compiled steps: a target, and a draft that agrees with it now and then."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tandem.runners.fused_step import fused
from tandem.runners.protocol import Limits, ProposeRow, Runner, RunnerIdentity
from tandem.runners.startup import Startup
from tandem.runners.torch import graphs, platforms
from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.graphs import Graph, GraphCompiler
from tandem.runners.torch.kernels import ATTENTION, register_attention
from tandem.runners.torch.platforms import CUDA
from tandem.runners.torch.slot_model import TorchModel
from tandem.runners.torch.torch_runner import TorchRunner
from tandem.speculation.types import SamplingParams, Verdict
from tests.rows import fill, fused_row, propose_row

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen2": lambda: (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen3": lambda: (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
}
LIMITS = Limits(slots=2, max_length=96, max_draft=3, chunk=16, vocab_size=SIZES["vocab_size"])
CACHE = (LIMITS.slots, LIMITS.max_length, 16, "cpu")
GREEDY = SamplingParams()
PROMPT = tuple(range(5, 26))


@functools.cache
def module(family: str, dtype: torch.dtype, draft: bool) -> Any:
    """The draft has the target's weights with noise on them."""
    register_attention()
    torch.manual_seed(3)
    kind, config = FAMILIES[family]()
    made = kind._from_config(config, attn_implementation=ATTENTION).eval().requires_grad_(False)
    if draft:
        for parameter in made.parameters():
            parameter += 0.003 * torch.randn_like(parameter)
    return made.to(dtype)


@functools.cache
def eager(family: str = "llama", dtype: torch.dtype = torch.float32, draft: bool = False) -> TorchRunner:
    own = copy.deepcopy(module(family, dtype, draft))  # packing replaces its layers
    runner = TorchRunner(TorchModel(own, *CACHE), LIMITS, identity(dtype), not draft)
    runner.warm_up()
    return runner


class Untraced(GraphCompiler):
    """Leaves steps as they are written, and counts them: to trace a pair's takes ten seconds."""

    def __init__(self) -> None:
        super().__init__("eager")

    def graph(self, name: str, step: nn.Module, arguments: Sequence[Any]) -> Graph:
        self.made += 1
        self.seconds += 1.5
        run: Graph = torch.no_grad()(step)
        return run


def compiler(traced: bool) -> GraphCompiler:
    """Traced whole, run by dynamo's own backend "eager": shapes and data flow are those of any other."""
    return GraphCompiler("eager") if traced else Untraced()


def on_graphs(patch: pytest.MonkeyPatch, make: Callable[[], GraphCompiler] = Untraced) -> None:
    """With `--device cuda` steps are graphs on this CPU, by compilers that `make` returns."""
    here = replace(CUDA, device="cpu", absent=lambda: None, every_bucket=False, code=None)
    patch.setitem(platforms.PLATFORMS, "cuda", here)
    patch.setattr(graphs, "GraphCompiler", lambda backend: make())


def _compiled(family: str, dtype: torch.dtype, draft: bool, limits: Limits, traced: bool) -> GraphRunner:
    model = GraphModel(module(family, dtype, draft), *CACHE)
    runner = GraphRunner(model, limits, identity(dtype), lambda: compiler(traced), not draft)
    runner.warm_up()
    return runner


@functools.cache
def compiled(traced: bool) -> tuple[GraphRunner, GraphRunner]:
    """A pair and its fused step."""
    target, draft = (_compiled("llama", torch.float32, draft, LIMITS, traced) for draft in (False, True))
    target.fuse(draft, Startup())
    return target, draft


@functools.cache
def compiled_target(family: str, dtype: torch.dtype, traced: bool) -> GraphRunner:
    """For one row only: two graphs."""
    return _compiled(family, dtype, False, replace(LIMITS, slots=1), traced)


def identity(dtype: torch.dtype) -> RunnerIdentity:
    return RunnerIdentity("tiny", "none", str(dtype).removeprefix("torch."), "cpu", "torch")


class Sequences:
    """Greedy fused decoding of sequences, in any company: as an engine does it."""

    def __init__(self, target: Runner, draft: Runner) -> None:
        self.target, self.draft = target, draft
        self.tokens: dict[int, list[int]] = {}
        self.accepted = 0

    def join(self, slot: int, prompt: Sequence[int]) -> None:
        fill(self.target, slot, prompt[:-1])
        fill(self.draft, slot, prompt[:-2])
        self.tokens[slot] = list(prompt)

    def round(self, slots: Sequence[int], k: int = 3) -> list[Verdict]:
        rows = [fused_row(self._row(slot, k)) for slot in slots]
        verdicts = []
        for slot, result in zip(slots, fused(self.target, self.draft)(rows), strict=True):
            assert not isinstance(result, Exception)
            self.tokens[slot] += result.verdict.token_ids
            self.accepted += result.verdict.accepted
            verdicts.append(result.verdict)
        return verdicts

    def _row(self, slot: int, k: int) -> ProposeRow:
        tokens = self.tokens[slot]
        return propose_row(slot, len(tokens) - 1, tuple(tokens[-2:]), k, GREEDY)


def plain(runner: TorchRunner, prompt: Sequence[int], count: int) -> list[int]:
    """The target alone, by module code."""
    tokens = list(prompt)
    for _ in range(count):
        fill(runner, 0, tokens[:-1])
        logits = runner.model.forward(
            [0], runner.model.tensor([[tokens[-1]] * 2]), runner.model.tensor([len(tokens) - 1])
        )
        tokens.append(int(logits[0, 0].argmax()))
    return tokens

"""EAGLE-3 heads where steps are graphs: what targets hand out, what the head drafts, and Trainium's rules for both."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.checkpoints.head_config import HeadConfig
from tandem.cli import main
from tandem.engine.batcher import Batcher
from tandem.engine.generators import fused_generator, plain_generator
from tandem.engine.load_models import Loaded, load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.eagle.eagle_runner import EagleRunner
from tandem.runners.load_runner import Execution, Shape
from tandem.runners.startup import Startup
from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_modules import PrefillModule, VerifyModule
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.graphs import GraphCompiler
from tandem.runners.torch.kernels import ATTENTION, register_attention
from tandem.runners.torch.slot_model import TorchModel
from tandem.speculation.types import Rule, SamplingParams
from tests.rows import fill, propose_row
from tests.runners.compiled import CACHE, GREEDY, LIMITS, PROMPT, SIZES, compiler, identity, module, on_graphs
from tests.runners.graph_check import Captured
from tests.runners.stablehlo import check_lowered
from tests.runners.strict import TRAINIUM, Checking, lively
from tests.runners.test_eagle import a_head, requests, said

TINY = HeadConfig(48, 6, 2, 8, 96, SIZES["vocab_size"], 100, 48, layers=(1, 1, 1))


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Pair:
    """A loaded pair on its event loop."""

    loop: asyncio.Runner
    target: Loaded
    draft: Loaded
    compilers: list[GraphCompiler]

    @property
    def graphs(self) -> Any:
        return self.draft.runner


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.thorough)], ids=["as written", "traced"]
)
def pair(target: Path, folder: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made: list[GraphCompiler] = []

    def make() -> GraphCompiler:
        made.append(compiler(request.param))
        return made[-1]

    batcher = Batcher("test")
    with asyncio.Runner() as loop:
        with pytest.MonkeyPatch.context() as patch:
            on_graphs(patch, make)
            loaded, draft = loop.run(load_pair(models(target, folder), batcher))
        assert draft is not None
        yield Pair(loop, loaded, draft, made)
        loop.run(batcher.close())


def models(target: Path, folder: Path, kind: str = "eagle", dtype: str = "float32") -> ModelConfig:
    execution, shape = Execution("cuda", dtype, threads=1), Shape(2, 96, 4, chunk=8)
    return ModelConfig(execution, shape, str(target), DraftChoice(kind, str(folder)), default_k=4)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["eagle", "hybrid"])
def test_requests_that_share_graphs_get_the_targets_own_tokens(pair: Pair, folder: Path, kind: str) -> None:
    async def use() -> None:
        assert pair.graphs.graphs
        generator = fused_generator(pair.target, pair.draft, 4, DraftChoice(kind, str(folder)))
        compiled = [one.made for one in pair.compilers]
        assert compiled[:2] == [3, 3], "prefill, and a step for one row and for two, of target and head"
        alone = [(await said(plain_generator(pair.target), request))[0] for request in requests()]
        together = await asyncio.gather(*(said(generator, request) for request in requests()))
        assert [tokens for tokens, _ in together] == alone
        assert all(stats.drafted and not stats.undrafted_rounds for _, stats in together)
        sampled, again = [await said(generator, replace(requests()[1], rule=Rule.REJECTION)) for _ in range(2)]
        assert sampled[0] == again[0] and len(sampled[0]) == 30 and sampled[1].drafted
        assert [one.made for one in pair.compilers] == compiled

    pair.loop.run(use())


def test_the_heads_graphs_draft_what_its_module_code_drafts(pair: Pair) -> None:
    graphs = pair.graphs
    eager = EagleRunner(graphs.head, graphs.features, graphs.embedding, graphs.limits, graphs.identity, graphs.platform)
    rows = []
    for slot, tokens in enumerate((tuple(range(60, 75)), tuple(range(90, 101)))):
        fill(pair.target.runner, slot, tokens[:-1])
        for runner in (graphs, eager):
            fill(runner, slot, tokens[: -1 - slot])
        rows.append(propose_row(slot, len(tokens) - 1, tokens[-1 - slot :], 4 - slot, GREEDY))
    ours, theirs = graphs.propose(rows), eager.propose(rows)
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]  # type: ignore[union-attr]
    assert [len(one.token_ids) for one in ours] == [4, 3]
    assert graphs.propose(rows[1:])[0].token_ids == ours[1].token_ids
    graphs.features.values[:, 3] = torch.nan
    fill(graphs, 0, tuple(range(60, 74)))
    assert all(buffer.isfinite().all() for buffer in graphs.slots.buffers)


def own_model(dtype: torch.dtype, platform: Any = None) -> GraphModel:
    """A model that may be given hooks."""
    return GraphModel(copy.deepcopy(module("llama", dtype, False)), *CACHE, platform=platform)


def test_graphs_that_were_made_without_a_head_say_so() -> None:
    runner = GraphRunner(own_model(torch.float32), LIMITS, identity(torch.float32), Checking)
    runner.compile(Startup())
    with pytest.raises(ValueError, match="made without an EAGLE head; load both together"):
        runner.hand_out((1, 1, 1))
    runner = GraphRunner(own_model(torch.float32), LIMITS, identity(torch.float32), Checking)
    features = runner.hand_out((1, 0, 1))
    runner.compile(Startup())
    assert runner.hand_out((1, 0, 1)) is features
    with pytest.raises(ValueError, match=r"hand out layers \[1, 0, 1\], not \[1, 1, 1\]"):
        runner.hand_out((1, 1, 1))


def lively_head(name: str, arguments: Sequence[Any]) -> list[Any]:
    """As `lively`; of a head, full caches and features, and a row in the middle of its sequence before padding."""
    if "head" not in name:
        return lively(name, arguments)
    chance = torch.Generator().manual_seed(len(name))
    buffers, *more, rows = arguments

    def random(value: torch.Tensor) -> torch.Tensor:
        return torch.randn(value.shape, generator=chance).to(value.dtype)

    more = [random(value) for value in more]
    fed = torch.randint(0, SIZES["vocab_size"], rows.shape, generator=chance, dtype=torch.int32)
    fed[0, :3] = torch.tensor([1, 40, 17 if "prefill" in name else 2])
    fed[1:] = rows[1:]
    filled = [random(value) for value in buffers]
    filled[2][0, 45, 3] = torch.inf  # a feature that is not finite
    return [filled, *more, fed]


def strict_graphs(dtype: torch.dtype, *wanted: str) -> dict[str, Captured]:
    """The graphs of a target that hands out features and of its head, checked, whose names begin as wanted."""
    compilers: list[Checking] = []

    def compiler() -> Checking:
        compilers.append(Checking(wanted, lively_head))
        return compilers[-1]

    target = GraphRunner(own_model(dtype, TRAINIUM), LIMITS, identity(dtype), compiler)
    features = target.hand_out((1, 0, 1))
    target.compile(Startup())
    head = a_head(TINY).to(dtype)
    own = (head, features, features.embedding, LIMITS, identity(dtype), TRAINIUM)
    drafting = EagleRunner(*own, beside=target)
    assert drafting.graphs
    drafting.graphs.compile(Startup())
    return {name: graph for one in compilers for name, graph in one.graphs.items()}


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_step_of_target_and_head_passes_trainiums_rules_and_lowers(dtype: torch.dtype) -> None:
    graphs = strict_graphs(dtype, "prefill", "verify", "head-")
    each = {f"{name}-{rows}x{size}" for rows in (1, 2) for name, size in SIZES_OF.items()}
    assert set(graphs) == each | {"prefill-1x16", "head-prefill-1x16"}
    check_lowered(graphs, dtype)


SIZES_OF = {"verify": 4, "head-propose": 3, "head-first": 8, "head-next": 1}


def test_a_heads_graph_writes_its_keys_and_values_and_nothing_else() -> None:
    (graph,) = strict_graphs(torch.float32, "head-prefill").values()
    written = [n for n in graph.module.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert len(written) == 2, "the target's features, the embedding and the rotary tables stay as they are"


@pytest.mark.thorough
def test_on_a_device_that_runs_graphs_alone_sampled_drafts_are_those_of_module_code(pair: Pair) -> None:
    made = pair.graphs
    platform = replace(made.platform, only_graphs=True)
    own = (made.head, made.features, made.embedding, made.limits, made.identity)
    graphs = EagleRunner(*own, platform, beside=pair.target.runner)  # type: ignore[arg-type]
    graphs.warm_up()
    tokens = tuple(range(60, 75))
    fill(pair.target.runner, 0, tokens[:-1])
    fill(made, 0, tokens[:-2])
    fill(graphs, 0, tokens[:-2])
    for sampling in (SamplingParams(temperature=0.3, seed=3), SamplingParams(temperature=0.2, top_k=9, seed=4)):
        for rule in (Rule.AGREEMENT, Rule.REJECTION):
            row = propose_row(0, 14, tokens[-2:], 4, sampling, rule)
            (ours,), (theirs,) = graphs.propose([row]), made.propose([row])
            assert ours.token_ids == theirs.token_ids and len(ours.token_ids) == 4
            assert len(ours.distributions) == (4 if rule is Rule.REJECTION else 0)


def test_compile_knows_a_head(
    target: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_graphs(monkeypatch)

    def compile_ahead(*more: str) -> int:
        words = ["--role", "compile", "--target_model", str(target), "--draft_model", str(folder), "--device", "cuda"]
        words += ["--dtype", "float32", "--threads", "1", "--compiled_dir", str(tmp_path), "--batch", "2"]
        shape = ["--sequence_length", "64", "--max_speculation_length", "2", "--prefill_chunk", "16"]
        return main.main([*words, *shape, *more])

    assert compile_ahead("--compile_for", "target,fused") == 0
    alone, beside, head, where = capsys.readouterr().out.splitlines()
    assert alone == f"target {target.name}: 3 compiled in 4.5 s; prefill-1x16, verify-1x3, verify-2x3"
    assert beside == f"target {target.name} beside its head: 3 compiled in 4.5 s; prefill-1x16, verify-1x3, verify-2x3"
    assert head == f"head {folder.name}: 3 compiled in 4.5 s; prefill-1x16, propose-1x2, propose-2x2"
    assert where.startswith(f"{tmp_path}: ready after ")
    assert compile_ahead("--compile_for", "draft") == 2
    assert "an EAGLE head drafts beside its target alone; compile fused" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_hands_out_features_has_the_bits_of_one_that_does_not(dtype: torch.dtype) -> None:
    plain, handing = own_model(dtype), own_model(dtype)
    handing.hand_out((0, 1, 1))
    prompt = torch.tensor([[1, 0, *PROMPT[:16]]], dtype=torch.int32)
    window = torch.tensor([[1, 16, 3, *PROMPT[16:20]], [0, 0, 0, *PROMPT[:4]]], dtype=torch.int32)
    found = []
    for model in (plain, handing):
        PrefillModule(model)(model.buffers, prompt)
        found.append(VerifyModule(model)(model.buffers, window))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.slots.buffers, handing.slots.buffers, strict=True))
    assert len(handing.buffers) == len(plain.buffers) + 1 and handing.buffers[-1].any()


def test_features_of_a_graph_are_those_of_module_code() -> None:
    register_attention()
    deep = LlamaForCausalLM._from_config(LlamaConfig(**SIZES | {"num_hidden_layers": 3}), attn_implementation=ATTENTION)
    ours = GraphModel(copy.deepcopy(deep.eval().requires_grad_(False)), *CACHE)
    theirs = TorchModel(deep, *CACHE, packed=False)
    wanted, found = theirs.hand_out((1, 2, 3)), ours.hand_out((1, 2, 3))
    rows = torch.tensor([[1, 8, 2, *PROMPT[8:12]], [0, 0, 0, *PROMPT[:4]]], dtype=torch.int32)
    VerifyModule(ours)(ours.buffers, rows)
    theirs.forward([1, 0], rows[:, 3:].long(), rows[:, 1].long())
    torch.testing.assert_close(found.values, wanted.values, atol=1e-5, rtol=1e-5)
    assert found.values[1, 8:12].any() and not found.values[1, :8].any()

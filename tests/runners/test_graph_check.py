"""What Trainium's compiler must be able to take: every step passes the strict check, and what it may not hold is seen.

Then each graph is lowered to StableHLO and run by XLA: its results are those of the graph run by torch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tandem.runners.fused_step import fused
from tandem.runners.startup import Startup
from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.graphs import TorchCompiler
from tandem.speculation.types import Rule, SamplingParams
from tests.daily import daily
from tests.rows import fused_row, propose_row
from tests.runners import stablehlo
from tests.runners.compiled import CACHE, LIMITS, PROMPT, Sequences, eager, fill, identity, module, plain
from tests.runners.graph_check import GraphRejected, StrictBackend, checked, tensors
from tests.runners.strict import TRAINIUM, model, steps

NO_STABLEHLO = stablehlo.missing()
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


@pytest.mark.parametrize(
    ("family", "dtype", "batches", "wanted"),
    [
        pytest.param("llama", torch.float32, (2,), ("verify",), marks=pytest.mark.thorough),
        *(
            pytest.param(family, dtype, batches, ("",), marks=[pytest.mark.thorough, pytest.mark.timeout(900)])
            for family, dtype, batches in (
                ("llama", torch.float32, (1, 2)),
                ("qwen2", torch.bfloat16, (2,)),
                ("qwen3", torch.float32, (2,)),
            )
        ),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_every_step_at_every_bucket_passes_and_lowers(
    family: str, dtype: torch.dtype, batches: tuple[int, ...], wanted: tuple[str, ...]
) -> None:
    graphs = steps(family, dtype, *batches, wanted=wanted)
    each = ("both fused-{}x3", "draft logits-{}x1", "draft logits-{}x8", "draft propose-{}x3")
    expected_names = {name.format(batch) for name in (*each, "target verify-{}x4") for batch in batches}
    expected_names |= {"draft prefill-1x16", "target prefill-1x16"}
    assert set(graphs) == {name for name in expected_names if name.split()[1].startswith(wanted)}
    if NO_STABLEHLO:
        pytest.skip(f"steps pass the strict check; not lowered: {NO_STABLEHLO}")
    for name, graph in graphs.items():
        functional = graph.functional()
        expected = list(tensors(functional(*[value.clone() for value in graph.inputs])))
        results = stablehlo.executed(stablehlo.lowered(functional), graph.inputs)
        for ours, theirs in zip(results, expected, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
            tolerance = agreement(name, dtype, ours)
            if tolerance is not None:
                torch.testing.assert_close(
                    ours, theirs, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )


def agreement(name: str, dtype: torch.dtype, result: Tensor) -> float | None:
    """How well XLA's result must agree with torch's. None: not at all.

    In bfloat16 many logits are equal or nearly so, and the two round differently: another token may be the largest,
    and what follows from it differs. Float32 says that a graph computes the right thing, bfloat16 that it runs.
    """
    if dtype is torch.float32:
        return TOLERANCE[dtype] if result.is_floating_point() else 0.0
    chained = name.split()[1].startswith(("propose", "fused"))
    return None if chained or not result.is_floating_point() else TOLERANCE[dtype]


class Planted(nn.Module):
    """A step that is fine but for what is planted in it."""

    def __init__(self, plant: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.plant = plant

    def forward(self, cache: Tensor, rows: Tensor) -> Tensor:
        return self.plant(cache, rows[:, 0])


def _index_put(cache: Tensor, at: Tensor) -> Tensor:
    cache[:, at.long()] = cache[:, :2]
    return at


def _returned(cache: Tensor, at: Tensor) -> Tensor:
    return cache.index_copy(1, at.long(), cache[:, :2] + 1)


def _drawn(cache: Tensor, at: Tensor) -> Tensor:
    return torch.multinomial(cache[0].softmax(-1), 1).int()


PLANTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "index_put": (_index_put, "index_put: not among the operations that are known to compile, at: cache"),
    "item": (lambda cache, at: at + int(at[0].item()), "item"),
    "multinomial": (_drawn, "multinomial: makes random numbers"),
    "rand": (lambda cache, at: at + torch.rand(2).int(), "rand: makes random numbers"),
    "float64": (lambda cache, at: (cache.double().sum() + at).int(), "_to_copy: torch.float64"),
    "int64": (lambda cache, at: (at.long() * 3).int(), "mul: 64-bit integers other than indices"),
    "scatter_add": (
        lambda cache, at: at.scatter_add(0, at.long(), at),
        "scatter_add: adds integers at indices",
    ),
    "cumprod": (lambda cache, at: at.cumprod(0, dtype=torch.int32), "cumprod: not among the operations"),
    "returned cache": (_returned, r"scatter: returns \[2, 5, 4\] that is not written in place"),
    "nonzero": (lambda cache, at: at[at > 1], "nonzero|data dependent|Dynamic|dynamic"),
}


@pytest.mark.parametrize("plant", daily(PLANTS, *range(0, len(PLANTS), 2)))
def test_what_is_planted_is_seen(plant: str) -> None:
    step, message = PLANTS[plant]
    with pytest.raises(GraphRejected, match=message):
        checked(Planted(step), (torch.zeros(2, 5, 4), torch.tensor([[1], [2]], dtype=torch.int32)))


def strict_pair() -> tuple[GraphRunner, GraphRunner, list[StrictBackend]]:
    """Target and draft whose every step is a graph that passed the check."""
    backends: list[StrictBackend] = []

    def compiler(_: str) -> TorchCompiler:
        backends.append(StrictBackend())
        return TorchCompiler(backends[-1])

    pair = []
    for draft in (False, True):
        runner = GraphRunner(model("llama", torch.float32, draft), LIMITS, identity(torch.float32), compiler, not draft)
        runner.warm_up()
        pair.append(runner)
    pair[0].fuse(pair[1], Startup())
    return pair[0], pair[1], backends


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_rows_join_and_leave_sampled_and_greedy_and_nothing_is_compiled_again() -> None:
    target, draft, backends = strict_pair()
    made = [len(backend.graphs) for backend in backends]
    assert made == [3, 7, 2]
    ours, chance = Sequences(target, draft), random.Random(4)
    truth = {slot: plain(eager(), prompt, 30) for slot, prompt in ((0, PROMPT), (1, PROMPT[::-1]))}
    ours.join(0, PROMPT)
    for number in range(8):
        if number == 2:
            ours.join(1, PROMPT[::-1])
        present = [slot for slot in ours.tokens if chance.random() < 0.8] or [0]
        ours.round(present, k=chance.randrange(1, 4))
        sampled(target, draft, present)
    for slot, tokens in ours.tokens.items():
        assert tokens == truth[slot][: len(tokens)]
    assert ours.accepted > 0 and len(ours.tokens[1]) > len(PROMPT) + 3
    assert [len(backend.graphs) for backend in backends] == made


def sampled(target: GraphRunner, draft: GraphRunner, slots: list[int]) -> None:
    """A sampled round of each rule, which writes no further than the greedy sequences' next round."""
    for rule in (Rule.AGREEMENT, Rule.REJECTION):
        rows = [
            fused_row(propose_row(slot, 70, PROMPT[-2:], 2, SamplingParams(temperature=0.8, top_k=20, seed=slot), rule))
            for slot in slots
        ]
        for result in fused(target, draft)(rows):
            assert not isinstance(result, Exception)
            assert len(result.proposal.token_ids) == 2
            assert len(result.proposal.distributions) == (2 if rule is Rule.REJECTION else 0)


@pytest.mark.thorough
@pytest.mark.parametrize("only", [None, tuple(range(3, 200, 2))], ids=["whole head", "frequent tokens"])
def test_a_draft_on_graphs_alone_draws_what_module_code_draws(only: tuple[int, ...] | None) -> None:
    runners = []
    for platform in (TRAINIUM, None):
        own = GraphModel(copy.deepcopy(module("llama", torch.float32, True)), *CACHE, only, platform=platform)
        runners.append(GraphRunner(own, LIMITS, identity(torch.float32), lambda _: TorchCompiler("eager"), False))
        runners[-1].warm_up()
        for slot in range(2):
            fill(runners[-1], slot, PROMPT[:-2])
    for rule in (Rule.AGREEMENT, Rule.REJECTION):
        sampling = (SamplingParams(temperature=0.05, top_k=30, top_p=0.6, seed=6), SamplingParams())
        rows = [propose_row(s, len(PROMPT) - 1, PROMPT[-2:], 3, own, rule) for s, own in enumerate(sampling)]
        ours, theirs = (runner.propose(rows) for runner in runners)
        assert [p.token_ids for p in ours] == [p.token_ids for p in theirs]  # type: ignore[union-attr]
        assert len(ours[0].distributions) == (3 if rule is Rule.REJECTION else 0)  # type: ignore[union-attr]

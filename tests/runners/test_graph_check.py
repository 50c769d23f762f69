"""What Trainium's compiler must be able to take: every step passes the strict check, and what it may not hold is seen.

Then each graph is lowered to StableHLO and run by XLA: its results are those of the graph run by torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.graphs import GraphCompiler
from tandem.speculation.types import Rule, SamplingParams
from tests.rows import fill, propose_row
from tests.runners.compiled import CACHE, LIMITS, PROMPT, identity, module
from tests.runners.graph_check import GraphRejected, checked
from tests.runners.stablehlo import check_lowered
from tests.runners.strict import TRAINIUM, steps


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "dtype", "batches"),
    [("llama", torch.float32, (1, 2)), ("qwen2", torch.bfloat16, (2,)), ("qwen3", torch.float32, (2,))],
)
def test_every_step_at_every_bucket_passes_and_lowers(
    family: str, dtype: torch.dtype, batches: tuple[int, ...]
) -> None:
    graphs = steps(family, dtype, *batches)
    each = ("both fused-{}x3", "draft logits-{}x1", "draft logits-{}x8", "draft propose-{}x3", "target verify-{}x4")
    wanted = {name.format(batch) for name in each for batch in batches}
    assert set(graphs) == wanted | {"draft prefill-1x16", "target prefill-1x16"}
    check_lowered(graphs, dtype, in_bfloat16=6e-2)


@pytest.mark.thorough
@pytest.mark.parametrize("only", [None, tuple(range(3, 200, 2))], ids=["whole head", "frequent tokens"])
def test_a_draft_on_graphs_alone_draws_what_module_code_draws(only: tuple[int, ...] | None) -> None:
    runners = []
    for platform in (TRAINIUM, None):
        own = GraphModel(copy.deepcopy(module("llama", torch.float32, True)), *CACHE, only, platform=platform)
        runners.append(GraphRunner(own, LIMITS, identity(torch.float32), lambda: GraphCompiler("eager"), False))
        runners[-1].warm_up()
        for slot in range(2):
            fill(runners[-1], slot, PROMPT[:-2])
    for rule in (Rule.AGREEMENT, Rule.REJECTION):
        sampling = (SamplingParams(temperature=0.05, top_k=30, top_p=0.6, seed=6), SamplingParams())
        rows = [propose_row(s, len(PROMPT) - 1, PROMPT[-2:], 3, own, rule) for s, own in enumerate(sampling)]
        ours, theirs = (runner.propose(rows) for runner in runners)
        assert [p.token_ids for p in ours] == [p.token_ids for p in theirs]  # type: ignore[union-attr]
        assert len(ours[0].distributions) == (3 if rule is Rule.REJECTION else 0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda at: at + int(at[0].item()), "item"),
        (lambda at: at + torch.rand(2).int(), "rand: makes random numbers"),
        (lambda at: (at.double() * 1).int(), "torch.float64"),
    ],
)
def test_what_a_graph_may_not_do_is_seen(plant: Callable[[Tensor], Tensor], said: str) -> None:
    class Step(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return plant(rows[:, 0])

    with pytest.raises(GraphRejected, match=said):
        checked(Step(), (torch.tensor([[1], [2]], dtype=torch.int32),))

"""Steps as graphs say what the steps themselves say, and no graph is made after warm-up."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.runners.batch_invariance import check_batch_invariance, check_fused_invariance
from tandem.runners.fused_step import fused_step
from tandem.runners.protocol import FusedRow, VerifyRow
from tandem.runners.torch import graph_runner
from tandem.runners.torch.graph_model import GraphModel
from tandem.runners.torch.graph_modules import VerifyModule, verify_greedy
from tandem.runners.torch.graph_runner import GraphRunner
from tandem.runners.torch.graphs import GraphCompiler, GraphRefused
from tandem.speculation.draws import BadLogits, draw
from tandem.speculation.processing import Processing
from tandem.speculation.rules import agree
from tandem.speculation.types import SamplingParams
from tests.rows import fill, fused_row, propose_row, verify_row
from tests.runners.compiled import (
    CACHE,
    GREEDY,
    LIMITS,
    PROMPT,
    Sequences,
    compiled,
    compiled_target,
    eager,
    module,
    plain,
)

SAMPLED = SamplingParams(temperature=0.9, seed=5)
PENALIZED = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5)


Pair = tuple[GraphRunner, GraphRunner]
TRACED = [False, pytest.param(True, marks=pytest.mark.thorough)]


@pytest.fixture(params=TRACED, ids=["as written", "traced"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return compiled(request.param)


def rows(drafts: list[tuple[int, ...]], sampling: SamplingParams = GREEDY) -> list[VerifyRow]:
    return [verify_row(slot, len(PROMPT) - 1, PROMPT[-1], draft, sampling) for slot, draft in enumerate(drafts)]


@pytest.mark.parametrize("traced", TRACED)
@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [("qwen2", torch.float32, 1e-5), ("qwen3", torch.float32, 1e-5), ("llama", torch.bfloat16, 2e-2)],
)
def test_compiled_steps_give_the_logits_and_verdicts_of_eager_ones(
    family: str, dtype: torch.dtype, tolerance: float, traced: bool
) -> None:
    target, ours = eager(family, dtype), compiled_target(family, dtype, traced)
    for runner in (target, ours):
        fill(runner, 0, PROMPT[:-1])
    (alone,) = target.verify(rows([()]))
    asked = rows([(*alone.token_ids, 8)])  # type: ignore[union-attr]
    expected, logits = target.verify_logits(asked), ours.verify_logits(asked)
    torch.testing.assert_close(logits[:, :3], expected[:, :3], atol=tolerance, rtol=tolerance)
    own = [
        agree(row.draft, lambda i, r=r: draw(logits[r, i].float().numpy(), GREEDY, 0)) for r, row in enumerate(asked)
    ]
    assert [(v.token_ids, v.accepted) for v in ours.verify(asked)] == [(v.token_ids, v.accepted) for v in own]


def test_acceptance_on_the_device_is_agreement_also_where_logits_are_not_finite() -> None:
    chance = torch.Generator().manual_seed(0)
    for _ in range(300):
        logits = torch.randint(0, 4, (3, 4, 5), generator=chance).float()  # ties are common
        logits[torch.rand(logits.shape, generator=chance) < 0.03] = float("nan")
        logits[torch.rand(logits.shape, generator=chance) < 0.03] = float("inf")
        drafts = torch.where(torch.rand((3, 3), generator=chance) < 0.7, logits[:, :3].argmax(-1), 2)
        counts = torch.randint(0, 4, (3,), generator=chance)
        best, accepted, sound = verify_greedy(logits, drafts, counts, torch.arange(4))
        for r in range(3):
            draft = drafts[r, : counts[r]].tolist()
            try:
                verdict = agree(draft, lambda i, own=logits[r]: draw(own[i].numpy(), GREEDY, 0))  # type: ignore[misc]
            except BadLogits:
                assert not sound[r]
                continue
            assert sound[r]
            assert int(accepted[r]) == verdict.accepted
            assert tuple(best[r, : verdict.accepted + 1].tolist()) == verdict.token_ids


def test_rows_join_and_leave_and_ask_for_any_length(pair: Pair) -> None:
    ours, chance = Sequences(*pair), random.Random(2)
    other = PROMPT[::-1]
    truth = {slot: plain(eager(), prompt, 40) for slot, prompt in ((0, PROMPT), (1, other))}
    ours.join(0, PROMPT)
    for number in range(14):
        if number == 3:
            ours.join(1, other)
        present = [slot for slot in ours.tokens if chance.random() < 0.8] or [0]
        chance.shuffle(present)
        ours.round(present, k=chance.randrange(1, 4))
    for slot, tokens in ours.tokens.items():
        assert tokens[:61] == truth[slot][: len(tokens)][:61]
    assert len(ours.tokens[1]) > len(PROMPT) + 8


@pytest.mark.parametrize(
    "row",
    [
        fused_row(propose_row(0, 20, PROMPT[-2:], 2, SAMPLED)),
        fused_row(propose_row(0, 20, PROMPT[-2:], 2, GREEDY), margins=True),
        fused_row(propose_row(0, 20, PROMPT[-1:], 2, GREEDY), copied=(4, 5)),
        fused_row(propose_row(0, 20, PROMPT[-1:], 0, GREEDY)),
        fused_row(propose_row(0, 20, PROMPT[-2:], 2, GREEDY), logprobs=3),
        fused_row(propose_row(0, 20, PROMPT[-2:], 2, PENALIZED, processor=Processing(PENALIZED, 9).after(PROMPT))),
    ],
    ids=["sampled", "margins", "copied", "undrafted", "logprobs", "penalized"],
)
def test_rows_that_the_fused_graph_cannot_answer_take_two_steps(pair: Pair, row: FusedRow) -> None:
    (target, draft), reference = pair, (eager(), eager(draft=True))
    for runner in (target, draft, *reference):
        fill(runner, 0, PROMPT[:-1])
    one_call = target.fused_with(draft)
    assert one_call is not None
    (ours,), (theirs,) = one_call([row]), fused_step(*reference, [row])
    assert ours.verdict.token_ids == theirs.verdict.token_ids  # type: ignore[union-attr]
    if row.propose.request.logprobs is not None:
        (alone,) = target.verify([verify_row(0, 20, PROMPT[-1], (), GREEDY, logprobs=row.propose.request.logprobs)])
        assert alone.logprobs == ours.verdict.logprobs[:1] and alone.logprobs  # type: ignore[union-attr]


def test_a_greedy_fused_round_is_one_copy_each_way_and_then_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Sequences(*pair)
    ours.join(0, PROMPT)
    ours.join(1, PROMPT[::-1])
    ours.round([0, 1])
    reads: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__index__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, n=name, o=original, **k: (reads.append(n), o(self, *a, **k))[1]
        )
    uploads: list[object] = []
    original_tensor = GraphModel.tensor
    monkeypatch.setattr(
        GraphModel, "tensor", lambda self, values: (uploads.append(values), original_tensor(self, values))[1]
    )
    for _ in range(3):
        ours.round([0, 1])
    assert reads == ["tolist"] * 3
    assert uploads == [], "the next round's rows were on the device"
    ours.round([1])
    assert len(uploads) == 1 and reads == ["tolist"] * 4


def test_a_step_of_another_shape_or_kind_is_refused_and_not_compiled() -> None:
    compiler = GraphCompiler("eager")
    model = GraphModel(module("qwen2", torch.float32, True), *CACHE)
    rows = model.tensor([[0, 0, 0, 1, 1]])
    graph = compiler.graph("verify", VerifyModule(model), (model.buffers, rows))
    compiler.seal()
    with pytest.raises(GraphRefused, match=r"rows of shape \[1, 6\] are not the bucket's \[1, 5\]"):
        graph(model.buffers, model.tensor([[0, 0, 0, 1, 1, 1]]))
    with pytest.raises(Exception, match=r"compiled again after warm-up|Hard failure due to fullgraph"):
        graph(model.buffers, rows.to(torch.int64))
    assert compiler.made == 1


class Faulty:
    """A compiled model whose logits depend on how many rows there are."""

    def __init__(self, model: GraphModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, slots, tokens, starts, length=None, head=True):  # type: ignore[no-untyped-def]
        out = self._model.forward(slots, tokens, starts, length, head)
        return out + 1e-4 if head and len(slots) == 1 else out


@pytest.mark.parametrize(("exact", "batches"), [(True, (2,)), (False, (1, 2))])
def test_graphs_whose_bits_differ_leave_one_bucket_or_are_said_to_differ(
    pair: Pair, exact: bool, batches: tuple[int, ...]
) -> None:
    sound = pair[0].model
    alone = check_batch_invariance(sound, LIMITS, (4,), (2,), graphs=True).bit_exact
    shapes = check_batch_invariance(Faulty(sound), LIMITS, (4,), (1, 2), exact=exact, graphs=True)  # type: ignore[arg-type]
    assert shapes.batches == batches
    assert shapes.bit_exact is (exact and alone)


def test_a_fused_graph_with_other_bits_is_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair
    graph = target._fused[id(draft)]
    assert check_fused_invariance(graph, LIMITS, target.shapes)
    run = graph_runner.FusedGraph.run

    def spoilt(self, given):  # type: ignore[no-untyped-def]
        logits, after, results = run(self, given)
        return torch.nextafter(logits, torch.tensor(torch.inf)), after, results

    monkeypatch.setattr(graph_runner.FusedGraph, "run", spoilt)
    assert not check_fused_invariance(graph, LIMITS, target.shapes)


def test_sampled_rows_follow_the_seeded_law_on_graphs_too(pair: Pair) -> None:
    (target, _), reference = pair, eager()
    for runner in (target, reference):
        for slot in range(2):
            fill(runner, slot, PROMPT[:-1])
    asked = rows([(7, 8), (9,)], SAMPLED)
    assert [v.token_ids for v in target.verify(asked)] == [v.token_ids for v in reference.verify(asked)]  # type: ignore[union-attr]

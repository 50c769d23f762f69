"""A target on two processes says what it says on one: transformers' sharding, our slots, and the ranks' protocol."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tandem.checkpoints.locate import find
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.load_models import _structures
from tandem.runners.families import UnsupportedModel, check_fits
from tandem.runners.fused_step import fused
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.protocol import PrefillRow
from tandem.runners.startup import Startup
from tandem.runners.torch.tensor_parallel import DRAFT, TARGET, Leader, RankLink, Ranks, follow
from tandem.speculation.processing import Processing
from tandem.speculation.types import InvalidField, Request, SamplingParams, Structure, StructureKind
from tests.rows import fused_row, propose_row, verify_row
from tests.runners.compiled import FAMILIES, GREEDY, LIMITS, SIZES
from tests.runners.ranks import logits_and_tokens, runner
from tests.support import REPOSITORY
from tests.toy import ToyConfig, ToyRunner, ToyTokenizer


def model_folder(folder: Path, tied: bool) -> Path:
    torch.manual_seed(3)
    config = Qwen3Config(**{**SIZES, "num_hidden_layers": 2, "vocab_size": 212}, head_dim=16, tie_word_embeddings=tied)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.thorough
def test_two_ranks_give_the_logits_and_the_tokens_of_one(tmp_path: Path) -> None:
    """With a head of its own, and with one that is tied to the embedding."""
    folders = [model_folder(tmp_path / name, name == "tied") for name in ("own", "tied")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*command, "--module", "tests.runners.ranks", *map(str, folders)], cwd=REPOSITORY, check=True, timeout=200
    )
    for folder in folders:
        check_ranks(folder, [torch.load(f"{folder}-{rank}.pt") for rank in range(2)])


def check_ranks(folder: Path, ranks: list[dict[str, Any]]) -> None:
    alone, tokens = logits_and_tokens(runner(folder, 1))
    for found in ranks:
        assert found["heads"] == SIZES["num_key_value_heads"] // 2
        for how in ("eager", "graphs"):
            torch.testing.assert_close(found[how][0], alone, atol=1e-5, rtol=1e-5)  # sums of halves: not its bits
            assert found[how][1] == tokens
            assert torch.equal(found[how][0], ranks[0][how][0]), "every rank has the same bits"
    assert len(ranks[0]["code"]) == 2, "one graph to prefill, one to verify"
    assert ranks[0]["code"] == ranks[1]["code"], "all ranks compile the same graphs, which passed the strict check"


def toys() -> tuple[ToyRunner, ToyRunner]:
    return ToyRunner(LIMITS, ToyConfig(0)), ToyRunner(LIMITS, ToyConfig(0, 0.3))


class Wire(RankLink):
    """What rank 0 says, kept; a second one says it again."""

    def __init__(self, said: list[object] | None = None) -> None:
        super().__init__()
        self.said, self.parted = said if said is not None else [], 0

    def _broadcast(self, slot: list[object]) -> object:
        if slot[0] is None and self.parted == 0 and self.heard:
            return self.said.pop(0)
        self.said.append(slot[0])
        return slot[0]

    heard = False

    def part(self) -> None:
        self.parted += 1


def test_followers_make_the_steps_that_rank_0_makes_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    target, draft = (Leader(own, wire, which) for own, which in zip(toys(), (TARGET, DRAFT), strict=True))
    for leader in (target, draft):
        leader.warm_up()
        assert leader.prefill([PrefillRow(0, 0, (5, 6, 7))]) == [None]
    row = propose_row(0, 3, (7, 8), 2, GREEDY)
    target.fuse(draft, Startup())
    (result,) = fused(target, draft)([fused_row(row)])
    assert not isinstance(result, Exception)
    (verdict,) = target.verify([verify_row(0, 3, 8, result.proposal.token_ids, GREEDY)])
    assert verdict.token_ids == result.verdict.token_ids  # type: ignore[union-attr]
    wire.leave()
    heard = Wire(list(wire.said))
    heard.heard = True
    made: list[tuple[int, str]] = []
    followers = toys()
    for which, own in enumerate(followers):
        for name in ("prefill", "propose", "verify"):
            monkeypatch.setattr(own, name, noted(made, which, name, getattr(own, name)))
    follow(heard, followers)
    steps = [(TARGET, "prefill"), (DRAFT, "prefill"), (DRAFT, "propose"), (TARGET, "verify"), (TARGET, "verify")]
    assert made == steps
    assert (wire.parted, heard.parted) == (1, 1)


def test_penalties_and_log_probabilities_are_those_of_one_process_on_every_rank_and_structures_are_refused() -> None:
    penalized, wire, alone = SamplingParams(repetition_penalty=1.5), Wire(), toys()[0]
    leader = Leader(toys()[0], wire, TARGET)
    engine = Engine(leader, Batcher("test"), structures=_structures(leader, ToyTokenizer()))
    engine.admit(Request(penalized, logprobs=3))
    with pytest.raises(InvalidField, match=r"^structure: not available"):
        engine.admit(Request(SamplingParams(structure=Structure(StructureKind.REGEX, "a+"))))
    processor = Processing(penalized, 3).after((5, 6, 7, 8))
    row = verify_row(0, 3, 8, (5, 6), penalized, processor=processor, logprobs=3)
    for each in (leader, alone):
        each.prefill([PrefillRow(0, 0, (5, 6, 7))])
    (verdict,) = leader.verify([row])
    sent = pickle.loads(pickle.dumps(wire.said[-1]))
    (elsewhere,) = alone.verify(sent[2])
    assert elsewhere == verdict and verdict.logprobs  # type: ignore[union-attr]


def noted(made: list[tuple[int, str]], which: int, name: str, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def noting(rows: Any) -> Any:
        made.append((which, name))
        return step(rows)

    return noting


@pytest.mark.parametrize(
    ("degree", "started", "message"),
    [
        (2, "1", "tp_degree: 2 needs 2 processes, and there is 1; start them with: torchrun --nproc-per-node 2"),
        (1, "4", "tp_degree: 1 needs 1 processes, and there are 4"),
    ],
)
def test_as_many_processes_as_the_degree_says_must_be_there(degree: int, started: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ranks.from_environment(degree, {"WORLD_SIZE": started, "RANK": "0"})


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="tp_degree: 4 does not divide the model's 2 key-value heads"):
        check_fits(FAMILIES["llama"]()[1], 64, ranks=4)


def test_a_draft_is_whole_on_every_rank(tmp_path: Path) -> None:
    torch.manual_seed(3)
    LlamaForCausalLM(FAMILIES["llama"]()[1]).save_pretrained(tmp_path)
    execution = Execution("cpu", "float32", 1, "off", tp_degree=2)
    draft = load_runner(find(str(tmp_path)), execution, Shape(1, 32, 2), verifies=False)
    assert draft.model.ranks == 1 and draft.model.slots.buffers[0].shape[0] == 2  # type: ignore[attr-defined]

"""A student copies before it is trained: the circuit written into its first two layers finds what came before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tandem_train.shards import TrainingSequence
from tandem_train.train import build
from tandem_train.train_loop import Softmax, copies, loss_of, make_batch
from tandem_train.training_settings import TrainConfig

VOCABULARY = 600


class Target(nn.Module):
    """As much of a target as a student starts from: a head."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=VOCABULARY, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def shaped(**shape: int) -> TrainConfig:
    return TrainConfig(Path(), Path(), **shape)  # type: ignore[arg-type]


def student(**shape: int):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    return build(Target(), shaped(**shape), torch.ones(VOCABULARY))


def induction(module, tokens: torch.Tensor, half: int) -> float:  # type: ignore[no-untyped-def]
    """Attention of the second layer's first head, from a repeated token to what followed it the first time."""
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        attention = module.model(input_ids=tokens, output_attentions=True).attentions[1][:, 0]
    places = torch.arange(1, half - 1)
    return float(attention[:, half + places, places + 1].mean())


@pytest.mark.parametrize("shape", [{}, {"hidden": 96, "layers": 3, "heads": 3, "feed_forward": 32}])
def test_it_looks_where_the_current_token_stood_before(shape: dict[str, int]) -> None:
    half = 60
    once = torch.randint(3, VOCABULARY, (4, half), generator=torch.Generator().manual_seed(2))
    found = induction(student(**shape), torch.cat((once, once), 1), half)
    assert found > 20 / (2 * half), f"attention {found:.3f} is hardly above chance"


@pytest.mark.parametrize(("changes", "named"), [({"heads": 3}, "heads: 3"), ({"layers": 0}, "layers: 0")])
def test_impossible_shapes_are_refused(changes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        shaped(**changes)


def answered(length: int, seed: int) -> TrainingSequence:
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, VOCABULARY, (length, 5)).astype(np.int32)
    logprobs = -np.sort(rng.random((length, 5))).astype(np.float16)
    return TrainingSequence("code", 0.0, rng.integers(3, VOCABULARY, 7).astype(np.int32), ids[:, 0], ids, logprobs)


def test_copies_say_something_twice() -> None:
    for one in copies([answered(50, 0), answered(3, 1)], 40, np.random.default_rng(0)):
        prompt, answer = one.prompt.tolist(), one.answer.tolist()
        assert one.kind == "copy" and len(answer) >= 1
        assert (one.ids[:, 0] == one.answer).all()
        begun = next(n for n in range(4) if prompt[len(prompt) - n :] + answer == prompt[: n + len(answer)])
        assert begun in (1, 2, 3)


def test_the_loss_is_the_cross_entropy_against_the_targets_distribution() -> None:
    module = student(hidden=32, layers=1, heads=2, feed_forward=16).train()
    batch = make_batch([answered(300, 3), answered(400, 4)])
    with torch.no_grad():
        loss, agreed = loss_of(module, batch, Softmax(torch.arange(VOCABULARY), VOCABULARY, 0, "cpu"), hard=0.25)
        logits = module(input_ids=batch.tokens).logits[batch.where[:, 0], batch.where[:, 1]]
    wanted = 0.75 * batch.probs
    wanted[:, 0] += 0.25
    plain = -(wanted * logits.log_softmax(-1).gather(1, batch.ids)).sum(-1).mean()
    assert float(loss) == pytest.approx(float(plain), rel=1e-5)
    assert int(agreed) == int((logits.argmax(-1) == batch.ids[:, 0]).sum())

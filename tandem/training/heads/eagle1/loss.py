"""The loss of EAGLE-1: regression of the target's hidden states, and their tokens by the target's output matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tandem.training.heads.eagle1.module import Eagle1Head
from tandem.training.shards import TrainingSequence


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """What a head takes of its target: its last norm, embedding and output matrix [vocabulary, hidden], float32.

    tap: where the hidden state after the last layer lies among the features of a token.
    """

    norm: nn.Module
    embedding: Tensor
    output: Tensor
    tap: slice

    def hidden(self, features: Tensor) -> Tensor:
        """The hidden states [tokens, hidden] after the last norm, from features [tokens, taps * hidden]."""
        with torch.no_grad():
            found: Tensor = self.norm(features[:, self.tap].to(self.output.device, torch.float32))
        return found


@dataclass(frozen=True, slots=True)
class Eagle1Batch:
    """Padded sequences: tokens [b, n], the target's hidden states [b, n, hidden].

    of, at [answered]: the rows that learn, which are those of answered tokens.
    """

    tokens: Tensor
    hidden: Tensor
    of: Tensor
    at: Tensor


def make_eagle1_batch(sequences: Sequence[tuple[TrainingSequence, Tensor]]) -> Eagle1Batch:
    """Stacks sequences with their hidden states [tokens, hidden]."""
    device, longest = sequences[0][1].device, max(len(hidden) for _, hidden in sequences)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    stacked = torch.zeros(len(sequences), longest, sequences[0][1].shape[1], device=device)
    of: list[int] = []
    at: list[int] = []
    for number, (one, hidden) in enumerate(sequences):
        own = np.concatenate((one.prompt, one.answer)).astype(np.int64)
        tokens[number, : len(own)] = torch.from_numpy(own)
        stacked[number, : len(own)] = hidden
        rows = range(max(0, len(one.prompt) - 2), len(own) - 2)
        of += [number] * len(rows)
        at += rows
    return Eagle1Batch(tokens.to(device), stacked, torch.tensor(of, device=device), torch.tensor(at, device=device))


@dataclass(frozen=True, slots=True)
class Eagle1Loss:
    """The two mean losses, and for each row that learns whether its token is the target's own choice [rows]."""

    regression: Tensor
    classification: Tensor
    hits: Tensor


def eagle1_loss(head: Eagle1Head, target: FrozenTarget, batch: Eagle1Batch, noise: Tensor | float = 0.0) -> Eagle1Loss:
    """Smooth L1 of the hidden states, and cross-entropy with what the target's output matrix makes of the true ones.

    noise: what is added to the hidden states that the head reads.
    """
    embeds = target.embedding[batch.tokens[:, 1:]]
    states = head(embeds, (batch.hidden + noise)[:, :-1])[batch.of, batch.at]
    wanted = batch.hidden[batch.of, batch.at + 1]
    regression = nn.functional.smooth_l1_loss(states, wanted)
    with torch.no_grad():
        theirs = wanted @ target.output.T
    logprobs = (states @ target.output.T).log_softmax(-1)
    classification = -(theirs.softmax(-1) * logprobs).sum(-1).mean()
    return Eagle1Loss(regression, classification, logprobs.argmax(-1) == theirs.argmax(-1))

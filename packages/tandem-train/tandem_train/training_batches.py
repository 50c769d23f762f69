"""Batches of training data, in a seeded order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tandem_train.shards import TrainingSequence


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A training batch; "answered" tokens are the target's.

    tokens: int64 [rows, length]. where: int64 [answered, 2], (row, column) that predicts each answered token. The
    target's best tokens: ids int64 and probs float32, [answered, top]. features [rows, length, 3 * hidden].
    """

    tokens: Tensor
    where: Tensor
    ids: Tensor
    probs: Tensor
    features: Tensor

    def to(self, device: str) -> TrainingBatch:
        parts = (self.tokens, self.where, self.ids, self.probs, self.features)
        return TrainingBatch(*(part.to(device) for part in parts))


def batch_groups(lengths: Sequence[tuple[int, int]], tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Indices of all sequences in random groups of about `tokens` answered tokens and similar lengths.

    `lengths`: (prompt tokens, answered tokens).
    """
    order = rng.permutation(len(lengths)).tolist()
    groups: list[list[int]] = []
    for start in range(0, len(order), 2048):
        group: list[int] = []
        size = 0
        for i in sorted(order[start : start + 2048], key=lambda i: sum(lengths[i])):
            group.append(i)
            size += lengths[i][1]
            if size >= tokens:
                groups.append(group)
                group, size = [], 0
        if group:
            groups.append(group)
    return [groups[g] for g in rng.permutation(len(groups)).tolist()]


def make_batch(data: Sequence[TrainingSequence], features: Sequence[Tensor]) -> TrainingBatch:
    """Pads and stacks sequences. `features`: [tokens, 3 * hidden] of each."""
    length = max(len(s.prompt) + len(s.answer) for s in data) - 1
    tokens = np.zeros((len(data), length), np.int64)
    where = []
    for r, s in enumerate(data):
        whole = np.concatenate((s.prompt, s.answer))[:-1]
        tokens[r, : len(whole)] = whole
        columns = np.arange(len(s.prompt) - 1, len(whole))
        where.append(np.stack((np.full_like(columns, r), columns), 1))
    logprobs = np.concatenate([s.logprobs for s in data]).astype(np.float32)
    return TrainingBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(np.concatenate(where)),
        torch.from_numpy(np.concatenate([s.ids for s in data]).astype(np.int64)),
        torch.softmax(torch.from_numpy(logprobs), -1),
        pad_sequence([each[:-1].float() for each in features], batch_first=True),
    )

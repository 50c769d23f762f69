"""The training-time test (Li et al. 2025): trains the head on its own hidden states, as it will draft.

Row r has the target's feature at position r and the embedding of token r + 1, and predicts token r + 2. In step s the
feature is the head's output of step s - 1 at row r - 1, and the row sees the s-th draft token's context: keys of the
target's features up to row r - s, then its own keys of steps 1 to s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.runners.eagle.module import EagleHead
from tandem_train.shards import TrainingSequence


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Padded sequences: tokens [b, n], features [b, n, 3 * hidden].

    Answered tokens: predicted by row `at` of sequence `of`; the target's best ids and probabilities [answered, top].
    """

    tokens: Tensor
    features: Tensor
    of: Tensor
    at: Tensor
    ids: Tensor
    probabilities: Tensor


def make_head_batch(
    sequences: Sequence[TrainingSequence], features: Sequence[Tensor], device: str = "cpu"
) -> HeadBatch:
    """Stacks sequences with their features [tokens, 3 * hidden]."""
    longest = max(map(len, features))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    stacked = torch.zeros(len(sequences), longest, features[0].shape[1], device=device)
    of: list[int] = []
    at: list[int] = []
    keep: list[int] = []
    for number, (one, read) in enumerate(zip(sequences, features, strict=True)):
        own = np.concatenate((one.prompt, one.answer)).astype(np.int64)
        tokens[number, : len(own)] = torch.from_numpy(own)
        stacked[number, : len(own)] = read.float()
        rows = len(one.prompt) - 2 + np.arange(len(one.answer))
        of += [number] * int((rows >= 0).sum())
        at += rows[rows >= 0].tolist()
        keep += (rows >= 0).tolist()
    kept = np.array(keep)
    ids = np.concatenate([one.ids for one in sequences])[kept].astype(np.int64)
    logprobs = np.concatenate([one.logprobs for one in sequences])[kept].astype(np.float32)
    probabilities = torch.softmax(torch.from_numpy(logprobs), -1)
    rows_of, rows_at, best = torch.tensor(of), torch.tensor(at), torch.from_numpy(ids)
    return HeadBatch(
        tokens.to(device), stacked, rows_of.to(device), rows_at.to(device), best.to(device), probabilities.to(device)
    )


def head_states(head: EagleHead, embedding: Tensor, batch: HeadBatch, steps: int) -> list[Tensor]:
    """The head's hidden states by step, [b, n - 1, hidden]; step s is valid from row s on."""
    embeds = embedding[batch.tokens[:, 1:]].to(head.fc.weight.dtype)
    count = embeds.shape[1]
    positions = torch.arange(count, device=embeds.device)[None].expand(len(embeds), -1)
    hidden = head.fuse(batch.features[:, :-1].to(head.fc.weight.dtype))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    for step in range(steps):
        residual, q, k, v = head.project(embeds, hidden, positions)
        groups = q.shape[1] // k.shape[1]
        keys.append(k.repeat_interleave(groups, 1))
        values.append(v.repeat_interleave(groups, 1))
        state = head.finish(residual, _attended(q, keys, values, step))
        states.append(state)
        hidden = torch.roll(state, 1, 1)
    return states


def _attended(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], step: int) -> Tensor:
    """Attends to keys of step 0 up to row r - step, and of step i at row r - step + i; [b, heads, rows, d]."""
    scale, rows = 1 / math.sqrt(q.shape[-1]), torch.arange(q.shape[2], device=q.device)
    seen = rows[None, :] <= rows[:, None] - step
    scores = q @ keys[0].transpose(-1, -2) * scale
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    own = [(q * torch.roll(keys[i], step - i, 2)).sum(-1, keepdim=True) * scale for i in range(1, step + 1)]
    weights = torch.softmax(torch.cat([scores, *own], -1), -1)
    out = weights[..., : len(rows)] @ values[0]
    for i in range(1, step + 1):
        out = out + weights[..., len(rows) + i - 1, None] * torch.roll(values[i], step - i, 2)
    return out


@dataclass(frozen=True, slots=True)
class StepLoss:
    """loss: mean cross-entropy. hits: answered tokens with the target's best token in the best column."""

    loss: Tensor
    hits: Tensor


def step_losses(head: EagleHead, embedding: Tensor, batch: HeadBatch, steps: int, hard: float = 0.0) -> list[StepLoss]:
    """Each step's loss against the target's distribution over the head's tokens.

    hard: weight of the target's best token. A best token that the head lacks is missed, not learnt.
    """
    columns = torch.full((len(head.t2d),), -1, device=batch.ids.device)
    columns[head.token_ids] = torch.arange(len(head.token_ids), device=columns.device)
    wanted = columns[batch.ids]
    weights = torch.where(wanted >= 0, batch.probabilities, 0)
    weights = (1 - hard) * weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    weights[:, 0] += hard
    learnt = wanted[:, 0] >= 0
    losses = []
    for step, state in enumerate(head_states(head, embedding, batch, steps)):
        rows = (batch.at >= step).nonzero()[:, 0]
        logprobs = head.logits(state[batch.of[rows], batch.at[rows]]).float().log_softmax(-1)
        entropy = -(weights[rows] * logprobs.gather(-1, wanted[rows].clamp(min=0))).sum(-1)
        mask = learnt[rows]
        loss = (entropy * mask).sum() / mask.sum().clamp(min=1)
        losses.append(StepLoss(loss, (logprobs.argmax(-1) == wanted[rows, 0]) & mask))
    return losses

"""The training loop: seeded order, saved every few minutes, resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tandem_train.shards import TrainingSequence
from tandem_train.training_settings import RunConfig, TrainConfig


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A training batch; "answered" tokens are the target's.

    tokens: int64 [rows, length]. where: int64 [answered, 2], (row, column) that predicts each answered token. The
    target's best tokens: ids int64 and probs float32, [answered, top]. features [rows, length, 3 * hidden]: for heads.
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


def make_batch(data: Sequence[TrainingSequence], features: Sequence[Tensor] = ()) -> TrainingBatch:
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
        pad_sequence([each[:-1].float() for each in features], batch_first=True) if features else torch.empty(0),
    )


def copies(data: Sequence[TrainingSequence], count: int, rng: np.random.Generator) -> list[TrainingSequence]:
    """`count` sequences that repeat a span of `data`; the answer is the repetition.

    Copying from the context is a small model's most useful skill, and the last it learns (Olsson et al. 2022).
    """
    made = []
    for i in rng.integers(len(data), size=count):
        whole = np.concatenate((data[i].prompt, data[i].answer))
        length = min(int(rng.integers(8, 64)), len(whole))
        start = int(rng.integers(len(whole) - length + 1))
        span, begun = whole[start : start + length], min(int(rng.integers(1, 4)), length - 1)
        between = whole[int(rng.integers(len(whole))) :][: int(rng.integers(0, 24))]
        answer = span[begun:]
        ids = np.zeros((len(answer), data[i].ids.shape[1]), np.int32)
        logprobs = np.full(ids.shape, -np.inf, np.float16)
        ids[:, 0], logprobs[:, 0] = answer, 0
        prompt = np.concatenate((span, between, span[:begun]))
        made.append(TrainingSequence("copy", 1.0, prompt, answer, ids, logprobs))
    return made


class Softmax:
    """A training step's vocabulary: `seen` ids and a random sample of the others."""

    def __init__(self, seen: Tensor, vocab_size: int, others: int, device: str) -> None:
        self.seen = seen.to(device)
        unseen = torch.ones(vocab_size, dtype=torch.bool)
        unseen[seen] = False
        self._rest = unseen.nonzero()[:, 0].to(device)
        self._others = min(others, len(self._rest))
        self._at = torch.full((vocab_size,), -1, dtype=torch.int64)
        self._at[seen] = torch.arange(len(seen))
        self._at = self._at.to(device)

    def sample(self) -> Tensor:
        """A step's ids, int64 [seen + others], `seen` first."""
        picked = torch.randint(len(self._rest), (self._others,), device=self.seen.device) if self._others else None
        return self.seen if picked is None else torch.cat((self.seen, self._rest[picked]))

    def columns(self, ids: Tensor) -> Tensor:
        """Columns of `ids` in a sample, int64 of the same shape; -1 outside `seen`."""
        return self._at[ids]


def loss_of(student: Any, batch: TrainingBatch, softmax: Softmax, hard: float) -> tuple[Tensor, Tensor]:
    """Returns the mean loss, and how many best tokens agree with the target's. `hard`: weight of the target's best."""
    hidden = student.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    rows, columns = hidden[batch.where[:, 0], batch.where[:, 1]], softmax.columns(batch.ids)
    probs = batch.probs * (1 - hard)
    probs[:, 0] += hard
    logits = (rows @ student.get_input_embeddings().weight[softmax.sample()].T).float()
    logprobs = logits.gather(1, columns.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    loss = -(probs * (columns >= 0) * logprobs).sum() / len(rows)
    return loss, (logits.argmax(-1) == columns[:, 0]).sum()


@torch.inference_mode()
def agreement(student: Any, data: Sequence[TrainingSequence], rows: int = 32) -> float:
    """Share of the tokens of greedy continuations that are the student's best."""
    right = tokens = 0
    greedy = sorted((s for s in data if s.temperature == 0), key=lambda s: len(s.prompt) + len(s.answer))
    student.eval()
    for at in range(0, len(greedy), rows):
        batch = make_batch(greedy[at : at + rows]).to(student.device.type)
        hidden = student.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        best = student.get_output_embeddings()(hidden[batch.where[:, 0], batch.where[:, 1]]).argmax(-1)
        right, tokens = right + int((best == batch.ids[:, 0]).sum()), tokens + len(best)
    student.train()
    return right / max(1, tokens)


def rate_at(step: int, steps: int, warm_up: int) -> float:
    """Learning rate of a step: linear warm-up, then cosine decay to a fiftieth."""
    if step < warm_up:
        return (step + 1) / warm_up
    along = (step - warm_up) / max(1, steps - warm_up)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))


class Resumable:
    """A resumable run of `total` steps in a seeded order. `trained`: the saved module."""

    def __init__(
        self, config: RunConfig, trained: Any, optimizer: torch.optim.Optimizer, total: int, show: Callable[[str], None]
    ) -> None:
        self._run, self._trained, self.optimizer, self.total, self.show = config, trained, optimizer, total, show
        self.device = next(trained.parameters()).device.type
        self.step, self.seconds, self.saved = 0, 0.0, time.monotonic()
        config.output.mkdir(parents=True, exist_ok=True)
        if config.state.exists():
            self._take_up(torch.load(config.state, weights_only=True, map_location=self.device))

    def _take_up(self, state: dict[str, Any]) -> None:
        if state["total"] != self.total:
            raise ValueError(f"{self._run.state}: of a run of {state['total']} steps, not {self.total}; remove it")
        self._trained.load_state_dict(state["trained"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.show(f"resuming from step {self.step}")

    def save(self) -> None:
        """Saves atomically."""
        state = {"trained": self._trained.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "total": self.total, "seconds": self.seconds}  # fmt: skip
        partial = self._run.state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._run.state)
        self.saved = time.monotonic()

    def run(self, sequences: Sequence[TrainingSequence]) -> float:
        """Trains to the last step; returns the seconds, earlier runs included."""
        self._trained.train()
        for group in self.groups(sequences):
            self.train_group([sequences[i] for i in group])
        self._trained.eval()
        return self.seconds

    def train_group(self, sequences: Sequence[TrainingSequence]) -> None:
        """One step on a batch."""
        raise NotImplementedError

    def groups(self, sequences: Sequence[TrainingSequence]) -> Iterator[list[int]]:
        """Batches of the remaining steps; call `take_step` between them."""
        lengths = [(len(one.prompt), len(one.answer)) for one in sequences]
        epoch = first = 0
        while self.step < self.total:
            groups = batch_groups(lengths, self._run.batch, np.random.default_rng([self._run.seed, epoch]))
            yield from groups[max(0, self.step - first) : self.total - first]
            first += len(groups)
            epoch += 1

    def take_step(self, loss: Tensor, began: float, most: float, described: str) -> None:
        """Takes the step of `loss`, with gradients of norm `most` at most; shows and saves now and then."""
        for part in self.optimizer.param_groups:
            part["lr"] = rate_at(self.step, self.total, self._run.warm_up) * self._run.rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained.parameters(), most)
        self.optimizer.step()
        self.step += 1
        self.seconds += time.monotonic() - began
        if self.step % 50 == 0 or self.step == self.total:
            left = self.seconds / self.step * (self.total - self.step) / 60
            self.show(f"step {self.step:,} of {self.total:,}: {described}, {left:.0f} min left")
        if time.monotonic() - self.saved > 60 * self._run.save_minutes:
            self.save()


class Training(Resumable):
    def __init__(
        self, config: TrainConfig, student: Any, softmax: Softmax, steps: int, show: Callable[[str], None]
    ) -> None:
        decayed = [p for p in student.parameters() if p.ndim > 1]
        other = [p for p in student.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": other, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.98), fused=True)
        self.config, self.student, self.softmax = config, student, softmax
        super().__init__(config, student, optimizer, steps, show)

    def train_group(self, sequences: Sequence[TrainingSequence]) -> None:
        began = time.monotonic()
        torch.manual_seed(self.config.seed * 1_000_003 + self.step)
        rng = np.random.default_rng([self.config.seed, self.step])
        twice = copies(sequences, round(self.config.copies * len(sequences)), rng)
        batch = make_batch([*sequences, *twice]).to(self.device)
        with torch.autocast(self.device, torch.bfloat16):
            loss, agreed = loss_of(self.student, batch, self.softmax, self.config.hard)
        self.take_step(
            loss, began, 1.0, f"loss {float(loss.detach()):.3f}, agreement {int(agreed) / len(batch.ids):.3f}"
        )

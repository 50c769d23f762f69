"""Samples continuations of many prompts at once, with the target's distribution at every token.

Draws depend on seed and index alone. Rows in a batch may change low bits and, rarely, a token; training data need not
be exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Temperature 0 is greedy."""

    index: int
    prompt: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class SamplerConfig:
    """rows: of a batch. top: ids kept per token. candidates: ids that a token is drawn from."""

    rows: int = 128
    max_new_tokens: int = 128
    top: int = 24
    candidates: int = 64
    seed: int = 1


class SampledRow:
    """A continuation: tokens [n]; the target's best ids and log-probabilities [n, top]."""

    def __init__(self, ask: SampleRequest, config: SamplerConfig) -> None:
        self.ask, self._config = ask, config
        self._tokens: list[int] = []
        self._ids: list[NDArray[np.int64]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._rng = np.random.Generator(np.random.Philox(key=np.array([config.seed, ask.index], dtype=np.uint64)))

    def push(self, ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> int:
        """Draws from candidates, most likely first; stores the token and its distribution."""
        pick = 0
        if self.ask.temperature:
            pick = int(np.argmax(logprobs / self.ask.temperature + self._rng.gumbel(size=len(ids))))
        self._tokens.append(int(ids[pick]))
        self._ids.append(ids[: self._config.top])
        self._logprobs.append(logprobs[: self._config.top])
        return self._tokens[-1]

    def ended(self, ends: frozenset[int]) -> bool:
        return len(self._tokens) == self._config.max_new_tokens or self._tokens[-1] in ends

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.array(self._tokens, np.int32)

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.stack(self._ids).astype(np.int32)

    @property
    def logprobs(self) -> NDArray[np.float16]:
        return np.stack(self._logprobs).astype(np.float16)


class BatchSampler:
    """`module`: a causal language model."""

    def __init__(self, module: Any, config: SamplerConfig, ends: Iterable[int]) -> None:
        self._module, self._config, self._ends = module, config, frozenset(ends)

    def run(self, asks: Sequence[SampleRequest]) -> Iterator[SampledRow]:
        """Yields continuations, those of short prompts first."""
        ordered = sorted(asks, key=lambda ask: len(ask.prompt))
        for start in range(0, len(ordered), self._config.rows):
            rows = [SampledRow(ask, self._config) for ask in ordered[start : start + self._config.rows]]
            self._continue(rows)
            yield from rows

    @torch.inference_mode()
    def _continue(self, rows: list[SampledRow]) -> None:
        from transformers import DynamicCache

        device, cache = self._module.device, DynamicCache()
        longest = len(rows[-1].ask.prompt)
        padded = [(longest - len(row.ask.prompt)) * [0] for row in rows]
        tokens = torch.tensor([[*pad, *row.ask.prompt] for pad, row in zip(padded, rows, strict=True)], device=device)
        mask = torch.tensor([[*pad, *[1] * (longest - len(pad))] for pad in padded], device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        while rows:
            logits = self._module(
                tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            ).logits
            tokens = torch.tensor(self._drawn(rows, logits[:, -1]), device=device)[:, None]
            mask = torch.cat((mask, torch.ones_like(tokens)), 1)
            positions = positions[:, -1:] + 1
            left = [i for i, row in enumerate(rows) if not row.ended(self._ends)]
            if len(left) < len(rows):
                kept = torch.tensor(left, dtype=torch.int64, device=device)
                rows, tokens, mask, positions = [rows[i] for i in left], tokens[kept], mask[kept], positions[kept]
                cache.batch_select_indices(kept)

    def _drawn(self, rows: Sequence[SampledRow], logits: Tensor) -> list[int]:
        """Draws from logits [rows, vocabulary]."""
        scores = logits.float()
        best, ids = scores.topk(self._config.candidates, dim=-1)
        logprobs = (best - scores.logsumexp(-1, keepdim=True)).cpu().numpy()
        return [row.push(*each) for row, *each in zip(rows, ids.cpu().numpy(), logprobs, strict=True)]

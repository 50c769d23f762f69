"""Runs unmodified transformers as a contender, in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.contenders import Answered
from tandem.checkpoints.locate import Checkpoint
from tandem.runners.loading import transformers_logging


class FirstTokens:
    """A transformers streamer that records when the first new tokens arrived, and how many."""

    def __init__(self) -> None:
        self._prompt_seen = False
        self.came = 0.0
        self.count = 0

    def put(self, ids: torch.Tensor) -> None:
        if self._prompt_seen and not self.count:
            self.came, self.count = time.perf_counter(), ids.numel()
        self._prompt_seen = True

    def end(self) -> None:
        """Does nothing: no token is held back."""


class StockModel:
    """A model with transformers' own attention and cache. Greedy; the end-of-sequence token ends nothing."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, threads: int | None) -> None:
        transformers_logging()
        if threads:
            torch.set_num_threads(threads)
        self.module: Any = AutoModelForCausalLM.from_pretrained(**checkpoint.source, dtype=getattr(torch, dtype)).eval()
        # Remove the end of sequence from the model's configuration too, which generate falls back to.
        self.module.generation_config = GenerationConfig(pad_token_id=0)
        self.module.config.eos_token_id = None

    @property
    def attention(self) -> str:
        return str(self.module.config._attn_implementation)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, **assistance: Any
    ) -> tuple[tuple[int, ...], FirstTokens]:
        """Generates tokens and records when the first arrived; `assistance` selects assisted generation."""
        ids, first = torch.tensor([prompt]), FirstTokens()
        out = self.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=first,
            **assistance,
        )
        return tuple(out[0, len(prompt) :].tolist()), first

    def as_assistant(self, k: int) -> Any:
        """Returns this model as an `assistant_model` that drafts up to `k` tokens in every round."""
        config = self.module.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = k, "constant"
        return self.module


@dataclass(frozen=True, slots=True)
class StockContender:
    """A stock model with or without assistance. Blocks this thread, since nothing else may run meanwhile."""

    name: str
    model: StockModel
    assistance: Mapping[str, Any]

    async def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answered:
        sent = time.perf_counter()
        token_ids, first = self.model.generate(prompt, max_new_tokens, **self.assistance)
        return Answered(token_ids, time.perf_counter() - sent, first.came - sent, first.count)

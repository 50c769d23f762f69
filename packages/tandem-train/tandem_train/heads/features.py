"""The target's hidden states, which EAGLE-3 heads learn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.checkpoints.head_config import default_layers
from tandem_train.shards import TrainingSequence


class FeatureTarget:
    """The target in transformers, with taps after three layers.

    batch: about the tokens of a step. Raises ValueError.
    """

    def __init__(self, source: dict[str, object], layers: Sequence[int] | None, device: str, batch: int) -> None:
        from transformers import AutoModelForCausalLM

        from tandem.runners.eagle.hidden_states import decoder_layers, tap
        from tandem.runners.loading import choose_dtype, transformers_logging
        from tandem.runners.torch.platforms import choose_platform

        transformers_logging()
        self.device = choose_platform(device).name
        module: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=choose_dtype("auto", self.device))
        self._module = module.to(self.device).eval().requires_grad_(False)
        count = len(decoder_layers(module))
        self.layers = tuple(layers or default_layers(count))
        if len(self.layers) != 3 or not all(1 <= layer <= count for layer in self.layers):
            raise ValueError(f"layers: {list(self.layers)} are not three of the target's {count}, counted from 1")
        tap(module, self.layers)
        self._batch = batch

    @torch.inference_mode()
    def features(self, data: Sequence[TrainingSequence]) -> list[Tensor]:
        """Features [tokens, 3 * hidden] of each sequence, on the target's device, in its dtype."""
        from transformers import DynamicCache

        sequences = [np.concatenate((one.prompt, one.answer)) for one in data]
        made: list[Tensor] = [torch.empty(0)] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
        while order:
            longest = len(sequences[order[-1]])
            group = [order.pop() for _ in range(min(len(order), max(1, self._batch // longest)))]
            padded = torch.zeros(len(group), longest, dtype=torch.int64)
            for row, i in enumerate(group):  # padding stands behind, where no token sees it
                padded[row, : len(sequences[i])] = torch.from_numpy(sequences[i].astype(np.int64))
            cache: Any = DynamicCache()
            cache.caught = {}
            self._module.base_model(input_ids=padded.to(self.device), past_key_values=cache)
            caught = torch.cat([cache.caught[layer] for layer in self.layers], dim=-1)
            for row, i in enumerate(group):
                made[i] = caught[row, : len(sequences[i])].clone()
        return made

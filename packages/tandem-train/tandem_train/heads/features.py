"""Generates the target's hidden states for the tokens of `tandem_train.generate`.

    python -m tandem_train.heads.features --data DIR [--target_model T]

An interrupted run continues after its last whole shard. Features take 6 bytes per token and unit of the hidden size:
3.5 kB a token for the embedded target, several GB for 700,000 tokens and their prompts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.head_config import default_layers
from tandem.checkpoints.locate import find, weights_revision
from tandem_train.command import Command, setting, show
from tandem_train.shards import ShardFolder, split

FOLDER = "features"


@dataclass(frozen=True, slots=True)
class FeaturesConfig:
    data: Path = setting("folder that tandem_train.generate wrote")
    target: str | None = setting("target, if not the embedded one", None, "target_model")
    layers: tuple[int, ...] | None = setting("take features after so many layers, such as 2,15,27, not as vLLM", None)
    batch: int = setting("tokens of a step", 2048)
    device: str = setting("cpu, cuda or auto", "auto")
    dtype: str = setting("number format of the target, or auto", "auto")

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch: {self.batch} is below 1")


class FeatureFolder:
    """Features of a data folder's shards, each bfloat16 [tokens, 3 * hidden] in the order of its tokens."""

    def __init__(self, data: Path) -> None:
        self.shards, self.claims = ShardFolder(data), ShardFolder(data / FOLDER)

    def meta(self) -> dict[str, Any]:
        """Target, layers and hidden size. Raises ValueError without features."""
        return self.claims.meta()

    def missing(self) -> list[int]:
        """Shards without features."""
        return [number for number in self.shards.numbers() if not self._file(number).exists()]

    def write(self, number: int, features: Tensor) -> None:
        """Writes a shard's features atomically."""
        bits: NDArray[np.int16] = features.to(torch.bfloat16).view(torch.int16).numpy()
        partial = self._file(number).with_name(f".features-{number:05d}.npy")
        np.save(partial, bits)
        os.replace(partial, self._file(number))

    def read(self, number: int) -> Tensor:
        """A shard's features, memory-mapped."""
        bits = np.load(self._file(number), mmap_mode="c")
        return torch.from_numpy(bits).view(torch.bfloat16)

    def _file(self, number: int) -> Path:
        return self.claims.folder / f"features-{number:05d}.npy"


def make_features(config: FeaturesConfig, show: Callable[[str], None]) -> int:
    """Writes missing features; returns the number of shards with features."""
    folder = FeatureFolder(config.data)
    checkpoint = unpacked(find(config.target))
    revision, of = weights_revision(checkpoint), folder.shards.meta()["target"]
    if of != revision:
        raise ValueError(f"{config.data}: holds data of the target {of}, not {revision}")
    target = FeatureTarget(checkpoint.source, config.layers, config.device, config.dtype, config.batch)
    folder.claims.claim({"target": revision, **target.meta})
    missing = folder.missing()
    for done, number in enumerate(missing, 1):
        started = time.monotonic()
        shard = folder.shards.read(number)
        features = torch.cat(target.features([np.concatenate((s.prompt, s.answer)) for s in split(shard)]))
        folder.write(number, features.to("cpu", torch.bfloat16))
        seconds = time.monotonic() - started
        show(f"shard {number}: {len(features):,} tokens in {seconds:.1f} s, {len(missing) - done} left")
    return len(folder.shards.numbers())


class FeatureTarget:
    """The target in transformers, with taps after three layers.

    batch: about the tokens of a step. Raises ValueError.
    """

    def __init__(
        self, source: dict[str, object], layers: Sequence[int] | None, device: str, dtype: str, batch: int
    ) -> None:
        from transformers import AutoModelForCausalLM

        from tandem.runners.eagle.hidden_states import decoder_layers, tap
        from tandem.runners.loading import choose_dtype, transformers_logging
        from tandem.runners.torch.platforms import choose_platform

        transformers_logging()
        self.device = choose_platform(device).name
        self._type: torch.dtype = choose_dtype(dtype, self.device)
        module: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=self._type)
        self._module = module.to(self.device).eval().requires_grad_(False)
        count = len(decoder_layers(module))
        self.layers = tuple(layers or default_layers(count))
        if len(self.layers) != 3 or not all(1 <= layer <= count for layer in self.layers):
            raise ValueError(f"layers: {list(self.layers)} are not three of the target's {count}, counted from 1")
        self.dtype, self.hidden = str(self._type).removeprefix("torch."), int(module.config.hidden_size)
        tap(module, self.layers)
        self._batch = batch

    @property
    def meta(self) -> dict[str, object]:
        """The metadata of its features."""
        return {"layers": list(self.layers), "hidden": self.hidden, "dtype": self.dtype}

    @torch.inference_mode()
    def features(self, sequences: Sequence[NDArray[np.int32]]) -> list[Tensor]:
        """Features [tokens, 3 * hidden] of each sequence, on the target's device, in its dtype."""
        from transformers import DynamicCache

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


def main(argv: Sequence[str] | None = None) -> int:
    command = Command("features", description="Generates the hidden states that EAGLE-3 heads learn from.")
    command.add_settings(FeaturesConfig)

    def work(args: dict[str, Any]) -> None:
        config = FeaturesConfig(**args)
        print(f"{config.data / FOLDER} holds the features of {make_features(config, show)} shards")

    return command.run(argv, work)


if __name__ == "__main__":
    sys.exit(main())

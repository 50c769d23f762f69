"""Reads tokens and features (stored or computed), and holds sequences out of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tandem_train.heads.features import FeatureFolder, FeatureTarget
from tandem_train.heads.settings import HeadTrainConfig
from tandem_train.shards import ShardFolder, TrainingSequence, split
from tandem_train.train import held_out_prompts


@dataclass(frozen=True, slots=True)
class Placed:
    """A sequence whose features begin at `start` in shard `number`."""

    sequence: TrainingSequence
    number: int
    start: int

    @property
    def length(self) -> int:
        return len(self.sequence.prompt) + len(self.sequence.answer)


# Features [tokens, 3 * hidden] of each of the sequences.
FeatureSource: TypeAlias = Callable[[Sequence[Placed]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class HeadData:
    """counts [vocabulary]: how often each token was the target's best. meta: layers and hidden size of the features."""

    train: list[Placed]
    held_out: list[Placed]
    counts: Tensor
    meta: dict[str, object]
    source: FeatureSource

    @property
    def tokens(self) -> int:
        return sum(len(one.sequence.answer) for one in self.train)

    def with_features(self, placed: Sequence[Placed]) -> list[tuple[TrainingSequence, Tensor]]:
        """Sequences with their features [tokens, 3 * hidden]."""
        return list(zip((one.sequence for one in placed), self.source(placed), strict=True))


def stored_features(folder: FeatureFolder) -> FeatureSource:
    def source(placed: Sequence[Placed]) -> list[Tensor]:
        read = lru_cache(maxsize=None)(folder.read)
        return [read(one.number)[one.start : one.start + one.length] for one in placed]

    return source


def computed_features(target: FeatureTarget) -> FeatureSource:
    """Features computed by the target on each use."""

    def source(placed: Sequence[Placed]) -> list[Tensor]:
        return target.features([np.concatenate((one.sequence.prompt, one.sequence.answer)) for one in placed])

    return source


def read_head_data(
    config: HeadTrainConfig, revision: str, vocab_size: int, target: FeatureTarget | None = None
) -> HeadData:
    """Reads config.data. target: computes features; None: stored ones. Raises ValueError."""
    shards = ShardFolder(config.data)
    if (of := shards.meta()["target"]) != revision:
        raise ValueError(f"{config.data}: holds data of the target {of}, not {revision}")
    meta, source = _features(config, revision, target)
    everything = [one for number in shards.numbers() for one in _placed(shards, number)]
    apart = _held_out(everything, config)
    train: list[Placed] = []
    tokens, counts = 0, np.zeros(vocab_size, np.int64)
    for one in everything:
        answered = one.sequence
        if answered.prompt.tobytes() in apart or (config.max_tokens is not None and tokens >= config.max_tokens):
            continue
        train.append(one)
        tokens += len(answered.answer)
        counts += np.bincount(answered.ids[:, 0], minlength=vocab_size)
    if not tokens:
        raise ValueError(f"{config.data}: no sequence to train on")
    held_out = [one for one in everything if one.sequence.prompt.tobytes() in apart]
    return HeadData(train, held_out, torch.from_numpy(counts), meta, source)


def _features(
    config: HeadTrainConfig, revision: str, target: FeatureTarget | None
) -> tuple[dict[str, object], FeatureSource]:
    if target is not None:
        return target.meta, computed_features(target)
    folder = FeatureFolder(config.data)
    meta = folder.meta()
    if meta["target"] != revision:
        raise ValueError(f"{config.data}: holds features of the target {meta['target']}, not {revision}")
    if missing := folder.missing():
        raise ValueError(f"{config.data}: {len(missing)} shards have no features; run tandem_train.heads.features")
    return meta, stored_features(folder)


def _placed(shards: ShardFolder, number: int) -> list[Placed]:
    start, found = 0, []
    for sequence in split(shards.read(number)):
        found.append(Placed(sequence, number, start))
        start += found[-1].length
    return [one for one in found if len(one.sequence.answer) and one.length > 2]


def _held_out(everything: Sequence[Placed], config: HeadTrainConfig) -> set[bytes]:
    """Selects prompts, at least one, whatever the order of the data."""
    kinds = {one.sequence.kind for one in everything}
    if unknown := sorted(set(config.held_out_kinds) - kinds):
        raise ValueError(f"held-out-kinds: the data has no {', '.join(unknown)}, only {', '.join(sorted(kinds))}")
    chosen = held_out_prompts({one.sequence.prompt.tobytes() for one in everything})
    of_kinds = {one.sequence.prompt.tobytes() for one in everything if one.sequence.kind in config.held_out_kinds}
    return {*chosen, *of_kinds}

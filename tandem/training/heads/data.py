"""Reads tokens with their features, and sets sequences apart that training does not see."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tandem.training.heads.features import FeatureFolder
from tandem.training.heads.settings import HeadTrainConfig
from tandem.training.settings import HELD_OUT
from tandem.training.shards import TrainingSequence, split


@dataclass(frozen=True, slots=True)
class Placed:
    """A sequence, and where its features lie: from `start` on, in those of shard `number`."""

    sequence: TrainingSequence
    number: int
    start: int

    @property
    def length(self) -> int:
        return len(self.sequence.prompt) + len(self.sequence.answer)


@dataclass(frozen=True, slots=True)
class HeadData:
    """The sequences to train on and those held out. counts [vocabulary]: how often each was the target's best token.

    meta: the features' target, layers and hidden size.
    """

    train: list[Placed]
    held_out: list[Placed]
    counts: Tensor
    meta: dict[str, object]
    folder: FeatureFolder

    @property
    def tokens(self) -> int:
        return sum(len(one.sequence.answer) for one in self.train)

    def with_features(self, placed: Sequence[Placed]) -> list[tuple[TrainingSequence, Tensor]]:
        """The sequences with their features [tokens, 3 * hidden]."""
        read = lru_cache(maxsize=None)(self.folder.read)
        return [(one.sequence, read(one.number)[one.start : one.start + one.length]) for one in placed]


def read_head_data(config: HeadTrainConfig, revision: str, vocab_size: int) -> HeadData:
    """Reads all shards. Holds out one prompt in HELD_OUT, and all of the held-out kinds. Raises ValueError."""
    folder = FeatureFolder(config.data)
    meta = folder.meta()
    if meta["target"] != revision:
        raise ValueError(f"{config.data}: holds features of the target {meta['target']}, not {revision}")
    if missing := folder.missing():
        raise ValueError(f"{config.data}: {len(missing)} shards have no features; run tandem.training.heads.features")
    everything = [one for number in folder.shards.numbers() for one in _placed(folder, number)]
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
    return HeadData(train, held_out, torch.from_numpy(counts), meta, folder)


def _placed(folder: FeatureFolder, number: int) -> list[Placed]:
    start, found = 0, []
    for sequence in split(folder.shards.read(number)):
        found.append(Placed(sequence, number, start))
        start += found[-1].length
    return [one for one in found if len(one.sequence.answer) and one.length > 2]


def _held_out(everything: Sequence[Placed], config: HeadTrainConfig) -> set[bytes]:
    """Selects prompts, at least one, independently of the order of the data."""
    kinds = {one.sequence.kind for one in everything}
    if unknown := sorted(set(config.held_out_kinds) - kinds):
        raise ValueError(f"held-out-kinds: the data has no {', '.join(unknown)}, only {', '.join(sorted(kinds))}")
    prompts = {one.sequence.prompt.tobytes() for one in everything}
    chosen = sorted(prompts, key=lambda p: (zlib.crc32(p), p))[: -(-len(prompts) // HELD_OUT)]
    of_kinds = {one.sequence.prompt.tobytes() for one in everything if one.sequence.kind in config.held_out_kinds}
    return {*chosen, *of_kinds}

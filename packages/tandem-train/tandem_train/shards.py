"""Training data in numbered shards, each written atomically.

A shard has tokens [n] of prompts and continuations, and for each generated token the target's best ids and
log-probabilities, [answered, top].
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_META = "data.json"


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A prompt [p], the target's answer [n] and its distributions [n, top]."""

    kind: str
    temperature: float
    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float16]


class ShardFolder:
    """Shards of one configuration. Raises ValueError for another's data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, meta: Mapping[str, Any]) -> None:
        """Stores the data's configuration. Raises ValueError if the folder has another."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / _META
        if not file.exists():
            file.write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
        for name, there in self.meta().items():
            if meta.get(name) != there:
                raise ValueError(f"{self.folder}: holds data made with {name} {there}, not {meta.get(name)}")

    def meta(self) -> dict[str, Any]:
        file = self.folder / _META
        if not file.is_file():
            raise ValueError(f"{file}: missing, so {self.folder} holds no training data")
        return json.loads(file.read_text())

    def numbers(self) -> list[int]:
        return sorted(int(f.stem.removeprefix("shard-")) for f in self.folder.glob("shard-*.npz"))

    def write(self, number: int, sequences: Sequence[TrainingSequence]) -> None:
        partial = self.folder / f".shard-{number:05d}.npz"
        np.savez(
            partial,
            lengths=np.array([len(s.prompt) + len(s.answer) for s in sequences], np.int32),
            prompts=np.array([len(s.prompt) for s in sequences], np.int32),
            kinds=np.array([s.kind for s in sequences]),
            temperatures=np.array([s.temperature for s in sequences], np.float32),
            tokens=np.concatenate([part for s in sequences for part in (s.prompt, s.answer)]),
            ids=np.concatenate([s.ids for s in sequences]),
            logprobs=np.concatenate([s.logprobs for s in sequences]),
        )
        os.replace(partial, self._file(number))

    def read(self, number: int) -> list[TrainingSequence]:
        with np.load(self._file(number)) as file:
            shard = dict(file)
        ends = np.cumsum(shard["lengths"])
        texts = np.split(shard["tokens"], ends[:-1])
        answered = np.cumsum(shard["lengths"] - shard["prompts"])[:-1]
        distributions = zip(np.split(shard["ids"], answered), np.split(shard["logprobs"], answered), strict=True)
        return [
            TrainingSequence(str(kind), float(temperature), text[:prompt], text[prompt:], ids, logprobs)
            for kind, temperature, prompt, text, (ids, logprobs) in zip(
                shard["kinds"], shard["temperatures"], shard["prompts"], texts, distributions, strict=True
            )
        ]

    def _file(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.npz"

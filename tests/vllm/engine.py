"""An engine loop that asks a drafter as vLLM 0.32 does: one call a step, with arrays in which rows come, go and move.

Its target is the toy model. A row that ends leaves a hole, into which the last row moves. A row that is preempted
leaves too, and comes back with all of its tokens in chunks, whose steps sample nothing.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tandem.vllm import RemoteDrafter
from tandem.vllm.drafter_settings import Settings
from tests.support import HANG, MAIN, ServerProcess, server_process
from tests.toy import VOCAB_SIZE, ToyConfig, toy_logits

LONGEST = 160
"""Tokens of a toy sequence."""


def vllm_config(k: int = 4, rank: int = 0, ranks: int = 1, vocab_size: int = VOCAB_SIZE, longest: int = LONGEST) -> Any:
    """What the drafter reads of vLLM's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="toy", tokenizer=None, max_model_len=longest, get_vocab_size=lambda: vocab_size
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks),
    )


def drafter(*workers: str, k: int = 4, **settings: Any) -> RemoteDrafter:
    given = {"budget_ms": 2000.0, "tokenizer_sha256": "toy", **settings}
    return RemoteDrafter(vllm_config(k), Settings(workers, **given))


@dataclass
class Sequence_:
    """A request. `left`: tokens of its prompt, or of what it had before preemption, that no step has read yet."""

    tokens: list[int]
    prompt: int
    count: int
    left: int
    draft: list[int] = field(default_factory=list)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.prompt :])


class Engine:
    """Runs requests, `rows` at once. `chunk`: tokens of a prompt that a step reads. `pause`: what a step takes."""

    def __init__(
        self, asked: RemoteDrafter, rows: int = 4, chunk: int = 16, pause: float = 0.0, model: ToyConfig | None = None
    ) -> None:
        self.drafter, self.rows, self.chunk, self.pause = asked, rows, chunk, pause
        self.model = model or ToyConfig()
        self.waiting: list[Sequence_] = []
        self.batch: list[Sequence_] = []
        self.done: list[Sequence_] = []
        self.ids = np.zeros((rows, LONGEST), np.int32)
        self.lengths = np.zeros(rows, np.int64)
        self.drafted = self.accepted = 0
        self.seconds: list[float] = []
        """Of the drafter's calls."""

    def add(self, prompt: bytes, count: int) -> Sequence_:
        self.waiting.append(Sequence_(list(prompt), len(prompt), count, len(prompt)))
        return self.waiting[-1]

    def preempt(self, at: int) -> None:
        row = self.batch[at]
        self._remove(at)
        row.left, row.draft = len(row.tokens), []
        self.waiting.append(row)

    def cancel(self, at: int) -> None:
        self._remove(at)

    def run(self, most: int = 10_000) -> None:
        """Steps until nothing is left."""
        for _ in range(most):
            if not (self.waiting or self.batch):
                return
            self.step()
        raise AssertionError("the engine did not end")

    def step(self) -> None:
        while self.waiting and len(self.batch) < self.rows:
            self.batch.append(self.waiting.pop(0))
        sampled = [self._sample(row) for row in self.batch]
        self._fill()
        time.sleep(self.pause)
        began = time.monotonic()
        drafts = self.drafter.propose(sampled, self.lengths, self.ids, slot_mappings=None)
        self.seconds.append(time.monotonic() - began)
        assert len(drafts) == len(self.batch)
        for row, new, draft in zip(self.batch, sampled, drafts, strict=True):
            assert all(0 <= token < VOCAB_SIZE for token in draft) and (new or not draft)
            assert len(row.tokens) + len(draft) < LONGEST
            row.draft = draft
        ended = [at for at, row in enumerate(self.batch) if len(row.output) >= row.count]
        for at in reversed(ended):
            self.done.append(self.batch[at])
            self._remove(at)

    def _sample(self, row: Sequence_) -> list[int]:
        """The tokens that a step gives a row: the drafts that are the target's own, and one more."""
        row.left = max(0, row.left - self.chunk)
        if row.left:
            return []
        new: list[int] = []
        for drafted in [*row.draft, None]:
            new.append(int(np.argmax(toy_logits([*row.tokens, *new], self.model))))
            if new[-1] != drafted or len(row.output) + len(new) >= row.count:
                break
        self.drafted += len(row.draft)
        self.accepted += len(new) - 1
        row.tokens += new
        return new

    def _fill(self) -> None:
        self.ids.fill(-1)  # what a row that left had is not there for the next
        for at, row in enumerate(self.batch):
            self.ids[at, : len(row.tokens)] = row.tokens
            self.lengths[at] = len(row.tokens)

    def _remove(self, at: int) -> None:
        last = self.batch.pop()
        if at < len(self.batch):
            self.batch[at] = last


def prompts(count: int, longest: int = 60, seed: int = 0) -> Sequence[bytes]:
    chance = random.Random(seed)
    return [bytes(chance.randrange(256) for _ in range(chance.randrange(2, longest))) for _ in range(count)]


WORKER = ("--role", "draft_worker", "--propose_only", "--sequence_length", "160", "--draft_model", "miss=0")


@contextlib.contextmanager
def worker(
    folder: Path, *flags: str, name: str = "worker.json", program: Sequence[str] = (MAIN,), slots: int = 8
) -> Iterator[ServerProcess]:
    ours = (*WORKER, "--batch", str(slots), "--metrics_port", "0")
    with server_process(folder, *ours, *flags, ready_file=name, program=program) as process:
        yield process


def scraped(process: ServerProcess, name: str) -> float:
    """The sum of a worker's metric over its labels."""
    ready = json.loads(process.ready_file.read_text())
    url = f"http://{ready['metrics_host']}:{ready['metrics_port']}/metrics"
    page = urllib.request.urlopen(url, timeout=HANG).read().decode()
    found = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name)]
    assert found, f"no {name} in {page}"
    return sum(found)


def until(condition: Callable[[], bool], seconds: float = HANG) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not come to be"
        time.sleep(0.02)

"""Generates training data: the target's continuations of prompts, with its distribution at every token.

    python -m tandem_train.generate --output DIR [--target_model T] [--tokens 2000000]

An interrupted run continues after its last whole shard. More data makes a better draft.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import find, weights_revision
from tandem.cli.option import option
from tandem.comparison.measuring.workloads import Prompt
from tandem.runners.load_runner import end_ids
from tandem_train.prompts import grammar, training_prompt
from tandem_train.shards import ShardFolder, TrainingSequence
from tandem_train.training_settings import run_command, show

Own = Mapping[str, Sequence[str]]


TOP, CANDIDATES = 24, 64  # ids kept per token, and those that a token is drawn from


class SampledRow:
    """A continuation (temperature 0: greedy), and the target's best ids and log-probabilities at each token."""

    def __init__(self, index: int, prompt: tuple[int, ...], temperature: float, seed: int) -> None:
        self.index, self.prompt, self._temperature = index, prompt, temperature
        self.tokens: list[int] = []
        self._ids: list[NDArray[np.int64]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._rng = np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))

    def push(self, ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> int:
        """Draws from candidates, most likely first; stores the token and its distribution."""
        pick = 0
        if self._temperature:
            pick = int(np.argmax(logprobs / self._temperature + self._rng.gumbel(size=len(ids))))
        self.tokens.append(int(ids[pick]))
        self._ids.append(ids[:TOP])
        self._logprobs.append(logprobs[:TOP])
        return self.tokens[-1]

    def sequence(self, kind: str) -> TrainingSequence:
        ids, logprobs = np.stack(self._ids).astype(np.int32), np.stack(self._logprobs).astype(np.float16)
        prompt, answer = (np.array(each, np.int32) for each in (self.prompt, self.tokens))
        return TrainingSequence(kind, self._temperature, prompt, answer, ids, logprobs)


TEMPERATURES = (0.0, 0.6, 0.9)  # one continuation of each prompt at each


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    output: Path = option("folder for the shards", group="training data")
    target_model: str | None = option("target, if not the embedded one")
    tokens: int = option("tokens to generate in all", default=2_000_000)
    own: int = option("prompts that the target writes itself", default=1500)
    own_raw: int = option("raw texts that the target writes itself", default=1500)
    shard: int = option("sequences per file", default=768)
    seed: int = option("seed of prompts and draws", default=1)
    rows: int = option("sequences at a time", default=128)
    max_prompt: int = option("prompt tokens kept", default=192)
    max_new_tokens: int = option("tokens per prompt", default=128)
    device: str = option("cpu, cuda or auto", default="auto")
    dtype: str = option("number format of the target, or auto", default="auto")

    def __post_init__(self) -> None:
        for name in ("tokens", "shard", "rows", "max_prompt", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')}: {getattr(self, name)} is below 1")
        for name in ("own", "own_raw"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name.replace('_', '-')}: {getattr(self, name)} is below 0")


def generate(config: GenerateConfig, show: Callable[[str], None]) -> int:
    """Writes shards up to config.tokens generated tokens; returns the number there."""
    target = _Target(config)
    folder = ShardFolder(config.output)
    folder.claim(_meta(config))
    own = _own_texts(config, target, show)
    done = {number: _answered(folder.read(number)) for number in folder.numbers()}
    total, fresh, began = sum(done.values()), 0, time.monotonic()
    for number in itertools.count():
        if total >= config.tokens:
            break
        if number in done:
            continue
        sequences = target.sequences(number, own)
        folder.write(number, sequences)
        total, fresh = total + _answered(sequences), fresh + _answered(sequences)
        show(f"{total:,} of {config.tokens:,} tokens, {fresh / (time.monotonic() - began):.0f} tokens/s")
    return total


def _answered(sequences: Sequence[TrainingSequence]) -> int:
    return sum(len(one.answer) for one in sequences)


def _meta(config: GenerateConfig) -> dict[str, Any]:
    skipped = {"output", "tokens", "rows", "device", "dtype", "target_model"}
    meta = {name: value for name, value in asdict(config).items() if name not in skipped}
    return meta | {"target": weights_revision(unpacked(find(config.target_model)))}


class _Target:
    def __init__(self, config: GenerateConfig) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from tandem.runners.load_runner import choose_dtype, transformers_logging
        from tandem.runners.torch.platforms import choose_platform

        transformers_logging()
        source = unpacked(find(config.target_model)).source
        device = choose_platform(config.device).name
        module: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=choose_dtype(config.dtype, device))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        self._config, self._module, self._ends = config, module.to(device).eval(), frozenset(end_ids(module))

    def _sample(self, rows: Sequence[SampledRow]) -> Iterator[SampledRow]:
        """Continues the rows; yields those of short prompts first."""
        ordered = sorted(rows, key=lambda row: len(row.prompt))
        for start in range(0, len(ordered), self._config.rows):
            batch = ordered[start : start + self._config.rows]
            self._continue(batch)
            yield from batch

    @torch.inference_mode()
    def _continue(self, rows: list[SampledRow]) -> None:
        from transformers import DynamicCache

        device, cache = self._module.device, DynamicCache()
        longest = len(rows[-1].prompt)
        padded = [(longest - len(row.prompt)) * [0] for row in rows]
        tokens = torch.tensor([[*pad, *row.prompt] for pad, row in zip(padded, rows, strict=True)], device=device)
        mask = torch.tensor([[*pad, *[1] * (longest - len(pad))] for pad in padded], device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        while rows:
            logits = self._module(
                tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            ).logits
            tokens = torch.tensor(_drawn(rows, logits[:, -1]), device=device)[:, None]
            mask = torch.cat((mask, torch.ones_like(tokens)), 1)
            positions = positions[:, -1:] + 1
            left = [i for i, row in enumerate(rows) if not self._ended(row)]
            if len(left) < len(rows):
                kept = torch.tensor(left, dtype=torch.int64, device=device)
                rows, tokens, mask, positions = [rows[i] for i in left], tokens[kept], mask[kept], positions[kept]
                cache.batch_select_indices(kept)

    def _ended(self, row: SampledRow) -> bool:
        return len(row.tokens) == self._config.max_new_tokens or row.tokens[-1] in self._ends

    def sequences(self, number: int, own: Own) -> list[TrainingSequence]:
        """Continuations of shard `number`'s prompts."""
        config, kinds, rows = self._config, dict[int, str](), []
        for index in range(number * config.shard, (number + 1) * config.shard):
            which, nth = divmod(index, len(TEMPERATURES))
            prompt = training_prompt(config.seed, which, own)
            kinds[index] = prompt.kind
            rows.append(SampledRow(index, self.encode(prompt)[-config.max_prompt :], TEMPERATURES[nth], config.seed))
        return [row.sequence(kinds[row.index]) for row in self._sample(rows)]

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.chat and self.tokenizer.chat_template:
            return tuple(self.tokenizer(self._chat(prompt.text), add_special_tokens=False)["input_ids"])
        return tuple(self.tokenizer(prompt.text)["input_ids"])

    def _chat(self, text: str) -> str:
        turn = [{"role": "user", "content": text}]
        return str(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    def write_prompts(self, count: int) -> list[str]:
        """Instructions by the target, from the start of a user turn alone (Magpie, Xu et al. 2024)."""
        mark = "\u241f"
        begin = self._chat(mark).split(mark)[0]
        texts = self._continued([begin] * count, 2**40)
        return sorted({text.strip() for text in texts if 12 < len(text.strip()) < 400})

    def write_texts(self, count: int) -> list[str]:
        """Texts by the target without a template, from openings of many kinds."""
        separator = self.tokenizer.bos_token or self.tokenizer.eos_token
        starts = grammar()["lists"]["starts"]
        begins = [starts[i % len(starts)] or separator for i in range(count)]
        own = {separator: ""}
        texts = {own.get(b, b) + text for b, text in zip(begins, self._continued(begins, 2**41), strict=True)}
        return sorted(text for text in texts if len(text.strip()) > 12)

    def _continued(self, begins: Sequence[str], first: int) -> list[str]:
        """The target's continuations of `begins` at temperature 1. first: index of the first one's noise."""
        ids = {begin: tuple(self.tokenizer(begin, add_special_tokens=False)["input_ids"]) for begin in set(begins)}
        rows = [SampledRow(first + i, ids[begin], 1.0, self._config.seed) for i, begin in enumerate(begins)]
        found = {row.index - first: row.tokens for row in self._sample(rows)}
        return [str(self.tokenizer.decode(found[i], skip_special_tokens=True)) for i in range(len(begins))]


def _drawn(rows: Sequence[SampledRow], logits: Tensor) -> list[int]:
    """Draws from logits [rows, vocabulary]."""
    scores = logits.float()
    best, ids = scores.topk(min(CANDIDATES, scores.shape[-1]), dim=-1)
    logprobs = (best - scores.logsumexp(-1, keepdim=True)).cpu().numpy()
    return [row.push(*each) for row, *each in zip(rows, ids.cpu().numpy(), logprobs, strict=True)]


def _own_texts(config: GenerateConfig, target: _Target, show: Callable[[str], None]) -> Own:
    file = config.output / "own_texts.json"
    if not file.exists():
        show(f"generating {config.own} prompts and {config.own_raw} raw texts with the target")
        made = {
            "instructions": target.write_prompts(config.own) if target.tokenizer.chat_template else [],
            "raw": target.write_texts(config.own_raw),
        }
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(made, indent=0))
        partial.rename(file)
    found: Own = json.loads(file.read_text())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    def work(config: GenerateConfig) -> None:
        print(f"{config.output} holds {generate(config, show):,} tokens of the target's")

    return run_command("Generates training data: the target's continuations.", GenerateConfig, argv, work)


if __name__ == "__main__":
    sys.exit(main())

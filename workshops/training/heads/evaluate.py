"""Measures a head beside its target, as fused_target runs them, and writes the model card next to the weights.

    python -m tandem.workshops.training.heads.evaluate --draft_model HEAD [--target_model T] [--temperatures 0,0.8]

It measures on the built-in prompts, none of which is used in training, and each kind of them apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.comparison.measuring.workloads import Prompt, built_in_prompts
from tandem.engine.batcher import Batcher
from tandem.engine.generator import Generator
from tandem.engine.generators import fused_generator
from tandem.engine.loading import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.loading import Execution, Shape
from tandem.speculation.types import Chunk, GenerationRequest, SamplingParams, SpeculationStats
from tandem.workshops.training.evaluate import temperatures, training_of
from tandem.workshops.training.heads.card import head_card

ALL = "all"


@dataclass(frozen=True, slots=True)
class HeadEvaluation:
    """What to measure: rounds of `k` draft tokens."""

    head: Path
    target: str | None = None
    temperatures: tuple[float, ...] = (0.0, 0.8)
    prompts: tuple[Prompt, ...] = built_in_prompts()
    k: int = 4
    max_new_tokens: int = 64
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        if self.k < 1 or self.max_new_tokens < 1:
            raise ValueError(f"k and max-new-tokens: {self.k} and {self.max_new_tokens} must be above 0")


@dataclass(slots=True)
class KindFigures:
    """Counts over the prompts of one kind. accepted: rounds in which at least the first 1, 2, ... drafts were."""

    prompts: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, tokens: int, stats: SpeculationStats, k: int) -> None:
        """Counts one request's tokens and rounds."""
        self.prompts, self.tokens, self.rounds = self.prompts + 1, self.tokens + tokens, self.rounds + stats.rounds
        self.drafted = _sums(self.drafted, stats.drafted_per_position, k)
        self.accepted = _sums(self.accepted, stats.accepted_per_position, k)

    @property
    def by_position(self) -> list[float]:
        """Of the drafts with an i-th token, in which share it was accepted."""
        return [round(a / d, 4) if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """The mean acceptance length: tokens that a round commits, the target's own included."""
        return round(self.tokens / self.rounds, 4) if self.rounds else 0.0


def _sums(left: Sequence[int], right: Sequence[int], k: int) -> list[int]:
    return [sum(side[i] for side in (left, right) if i < len(side)) for i in range(k)]


async def evaluate(config: HeadEvaluation, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measures at every temperature; writes and returns the figures (acceptance.json), and writes the card (README.md).

    Raises ValueError.
    """
    training = training_of(config.head)
    found: list[dict[str, Any]] = []
    async with _generator(config) as generator:
        for temperature in config.temperatures:
            kinds = await _measured(config, generator, temperature, show)
            found.append(_figures(config, generator, temperature, kinds))
            (config.head / "acceptance.json").write_text(json.dumps(found, indent=1) + "\n")
    (config.head / "README.md").write_text(head_card(found, training))
    return found


@asynccontextmanager
async def _generator(config: HeadEvaluation) -> AsyncIterator[Generator]:
    choice = DraftChoice("eagle", str(config.head))
    shape = Shape(slots=1, max_draft=config.k)
    models = ModelConfig(config.execution, shape, config.target, choice, default_k=config.k)
    batcher = Batcher("evaluate")
    try:
        target, head = await load_pair(models, batcher)
        yield fused_generator(target, head, config.k, choice)
    finally:
        await batcher.close()


async def _measured(
    config: HeadEvaluation, generator: Generator, temperature: float, show: Callable[[str], None]
) -> dict[str, KindFigures]:
    kinds: dict[str, KindFigures] = {ALL: KindFigures()}
    sampling = SamplingParams(temperature=temperature, seed=1 if temperature else 0)
    for number, prompt in enumerate(config.prompts, 1):
        show(f"temperature {temperature:g}: {prompt.name} ({number} of {len(config.prompts)})")
        request = GenerationRequest(
            text=prompt.text, chat=bool(prompt.chat), sampling=sampling, max_new_tokens=config.max_new_tokens
        )
        stats, tokens = SpeculationStats(), 0
        async for part in generator.generate(request, stats):
            tokens += len(part.token_ids) if isinstance(part, Chunk) else 0
        for name in (f"{prompt.kind}, {'chat' if prompt.chat else 'raw'}", ALL):
            kinds.setdefault(name, KindFigures()).add(tokens, stats, config.k)
    return kinds


def _figures(
    config: HeadEvaluation, generator: Generator, temperature: float, kinds: dict[str, KindFigures]
) -> dict[str, Any]:
    measured = {
        name: asdict(one) | {"by_position": one.by_position, "tokens_per_round": one.tokens_per_round}
        for name, one in kinds.items()
    }
    return {
        "target": generator.info.model_name,
        "weights_revision": generator.info.weights_revision,
        "dtype": generator.info.dtype,
        "device": generator.info.device,
        "backend": generator.info.backend,
        "temperature": temperature,
        "k": config.k,
        "max_new_tokens": config.max_new_tokens,
        "kinds": measured,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures an EAGLE-3 head and writes its model card.")
    parser.add_argument("--draft_model", "--draft-model", type=Path, required=True, help="folder that train wrote")
    parser.add_argument("--target_model", "--target-model", help="target (default: the embedded one)")
    parser.add_argument("--temperatures", default="0,0.8", help="comma-separated; 0 is greedy (default 0,0.8)")
    parser.add_argument("--k", type=int, default=4, help="draft tokens of a round (default 4)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", default="auto", help="the target's steps: auto, native or off")
    args = parser.parse_args(argv)
    try:
        config = HeadEvaluation(
            args.draft_model,
            args.target_model,
            temperatures(args.temperatures),
            k=args.k,
            max_new_tokens=args.max_new_tokens,
            execution=Execution(args.device, args.dtype, compile=args.compile),
        )
        found = asyncio.run(evaluate(config, lambda line: print(line, file=sys.stderr, flush=True)))
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    for one in found:
        for name, kind in one["kinds"].items():
            print(f"temperature {one['temperature']:g}, {name}: {kind['tokens_per_round']:.2f} tokens a round")
    print(f"wrote {config.head / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures a trained draft against its target, and writes the model card next to the weights.

    python -m tandem.workshops.training.evaluate --draft_model DRAFT [--temperatures 0,0.8] [--curve RUN ...]

It measures the same as `main.py --role accept`, on the built-in prompts, none of which is used in training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.comparison.measuring.workloads import Prompt, built_in_prompts
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.loading import Execution, Shape
from tandem.speculation.types import SamplingParams
from tandem.workshops.training.acceptance.measure import AcceptConfig, PairMeasurement, measure
from tandem.workshops.training.card import card


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    """What to evaluate. curve: drafts trained on less data, whose held-out agreement the card compares."""

    draft: Path
    target: str | None = None
    temperatures: tuple[float, ...] = (0.0, 0.8)
    curve: tuple[Path, ...] = ()
    prompts: tuple[Prompt, ...] = built_in_prompts()
    max_new_tokens: int = 64
    longest: int = 8
    repeats: int = 15
    dtype: str = "auto"
    device: str = "auto"


async def evaluate(config: EvaluateConfig, show: Callable[[str], None]) -> list[PairMeasurement]:
    """Measures at every temperature; writes and returns the results (acceptance.json), and writes the card (README.md).

    The results of a temperature are written before the next is measured.
    """
    found: list[PairMeasurement] = []
    for temperature in config.temperatures:
        found.append(await measure(_accept(config, temperature), show))
        figures = json.dumps([json.loads(one.as_json()) for one in found], indent=1)
        (config.draft / "acceptance.json").write_text(figures + "\n")
    training = training_of(config.draft)
    (config.draft / "README.md").write_text(card(found, training, [training_of(run) for run in config.curve]))
    return found


def _accept(config: EvaluateConfig, temperature: float) -> AcceptConfig:
    return AcceptConfig(
        models=ModelConfig(
            execution=Execution(config.device, config.dtype),
            shape=Shape(slots=1, max_draft=config.longest + 1),
            model=config.target,
            draft=DraftChoice("hybrid", str(config.draft)),
        ),
        prompts=config.prompts,
        sampling=SamplingParams(temperature=temperature, seed=1 if temperature else 0),
        max_new_tokens=config.max_new_tokens,
        longest=config.longest,
        repeats=config.repeats,
    )


def training_of(folder: Path) -> dict[str, Any]:
    """The training.json of a folder that a training run wrote. Raises ValueError."""
    file = folder / "training.json"
    if not file.is_file():
        raise ValueError(f"{file}: missing; train writes it")
    return json.loads(file.read_text())


def temperatures(text: str) -> tuple[float, ...]:
    """Reads a list like 0,0.8. Raises ValueError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"temperatures: {text!r} is not a list like 0,0.8") from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures a draft and writes its model card.")
    parser.add_argument("--draft_model", "--draft-model", type=Path, required=True, help="folder that train wrote")
    parser.add_argument("--target_model", "--target-model", help="target (default: the embedded one)")
    parser.add_argument("--temperatures", default="0,0.8", help="comma-separated; 0 is greedy (default 0,0.8)")
    parser.add_argument("--curve", type=Path, nargs="*", default=[], help="drafts trained on less, for the curve")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    try:
        config = EvaluateConfig(
            args.draft_model,
            args.target_model,
            temperatures(args.temperatures),
            tuple(args.curve),
            max_new_tokens=args.max_new_tokens,
            dtype=args.dtype,
            device=args.device,
        )
        found = asyncio.run(evaluate(config, lambda line: print(line, file=sys.stderr, flush=True)))
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    from rich.console import Console

    from tandem.workshops.training.acceptance.show import print_measured

    for one in found:
        print_measured(one, Console())
    print(f"wrote {config.draft / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

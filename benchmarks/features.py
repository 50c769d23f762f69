"""Measures what handing out features costs a target: `python -m benchmarks.features`.

Two targets of the same weights answer in turn, one of which writes hidden states down in every step. Rounds of a given
draft length are timed on the device thread, in pairs of neighbours whose order changes: steps that only write features,
and steps whose verdict also has them, as bfloat16 and as int8. What features are worth is measured by the comparison
(`--architectures ...,distributed_head`), whose bytes are those printed here.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.loading import load
from tandem.engine.model_config import ModelConfig
from tandem.engine.sequences import TargetSequence
from tandem.runners.loading import Execution, Shape
from tandem.speculation.features import FeatureFormat, FeatureSpec
from tandem.speculation.types import Request

PROMPT = 48
"""Tokens before the first round."""


@dataclass(frozen=True)
class Settings:
    """The settings of one run."""

    rounds: int
    draft_tokens: int
    model: str | None
    threads: int | None
    dtype: str
    output: Path


@dataclass
class Outcome:
    """Seconds of steps without and with features, in pairs; bytes of a position; `same`: pairs with the same tokens."""

    pairs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    position_bytes: dict[str, int] = field(default_factory=dict)
    same: int = 0
    asked: int = 0


async def measure(settings: Settings, outcome: Outcome) -> None:
    batcher = Batcher("benchmark")
    execution = Execution(threads=settings.threads, dtype=settings.dtype)
    config = ModelConfig(execution, Shape(2, PROMPT + settings.draft_tokens + 8, settings.draft_tokens), settings.model)
    plain, handing = [(await load(config, batcher)).engine for _ in range(2)]
    await handing.hand_out_features()
    assert handing.features is not None
    text = [(7 + 31 * i) % plain.runner.limits.vocab_size for i in range(PROMPT + settings.draft_tokens)]
    specs: dict[str, FeatureSpec | None] = {"none": None}
    for number_format in FeatureFormat:
        spec = specs[number_format.value] = handing.features.spec(handing.features.layers, number_format)
        outcome.position_bytes[number_format.value] = spec.position_bytes
    sequences = {engine: TargetSequence(engine, 0, Request()) for engine in (plain, handing)}

    async def timed(engine: Engine, spec: FeatureSpec | None) -> tuple[tuple[int, ...], float]:
        sequences[engine].request = Request(features=spec)
        verdict = await sequences[engine].verify(text[:PROMPT], text[PROMPT:])
        return verdict.token_ids, verdict.compute_seconds

    for run in range(settings.rounds + 1):  # the first one warms up
        for name, asked in specs.items():
            found = {}
            for engine in (plain, handing) if run % 2 else (handing, plain):
                found[engine] = await timed(engine, asked if engine is handing else None)
            outcome.asked += 1
            outcome.same += found[plain][0] == found[handing][0]
            if run:
                outcome.pairs.setdefault(name, []).append((found[plain][1], found[handing][1]))
    await batcher.close()


def report(outcome: Outcome) -> list[str]:
    lines = []
    for name, pairs in outcome.pairs.items():
        without, having = (1000 * statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        size = outcome.position_bytes.get(name, 0)
        lines.append(
            f"{name:9} {without:7.2f} ms without, {having:7.2f} ms with: ratio {ratio:.3f}; {size} bytes a position"
        )
    return [*lines, f"same tokens with and without: {outcome.same}/{outcome.asked}"]


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = Parser(prog="features", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.flag("--rounds", type=positive, default=200, metavar="N", help="pairs of each kind (default: 200)")
    parser.flag("--draft-tokens", type=positive, default=3, metavar="K", help="of each round (default: 3)")
    parser.flag("--model", help="target (default: the embedded one)")
    parser.flag("--threads", type=positive, metavar="N", help="threads of a step (default: torch's choice)")
    parser.flag("--dtype", default="auto", help="(default: auto)")
    parser.flag("--output", type=Path, default=Path("results/features.json"), help="(default: %(default)s)")
    return Settings(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    settings, outcome = parse(argv), Outcome()
    document = lambda: {"settings": asdict(settings), "measured": asdict(outcome), "report": report(outcome)}  # noqa: E731
    with kept(settings.output, document, lambda: asdict(outcome)):
        asyncio.run(measure(settings, outcome))
    print("\n".join(report(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

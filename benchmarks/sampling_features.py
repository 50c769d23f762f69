"""Measures what log-probabilities, structured output and sampling cost: `python -m benchmarks.sampling_features`.

The embedded pair answers the same prompts plainly, with log-probabilities, with a JSON schema, and sampled, in turn.
The prompts make it write JSON that the schema allows, so the first three give the same tokens. A masked draft is
accepted a little more often, and a sampled one less, so besides TPOT the milliseconds of a round are compared, in which
that does not count (those of sampled requests are held against the bar); and the processor seconds of a round, which
other programs on the machine change least (use one thread for them: idle threads spin).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from tandem.engine.batcher import Batcher
from tandem.engine.generator import Generator
from tandem.engine.generators import fused_generator, plain_generator
from tandem.engine.load_models import load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.load_runner import Execution, Shape
from tandem.speculation.types import Chunk, GenerationRequest, SamplingParams, Structure, StructureKind

SAMPLED = {
    "temperature": SamplingParams(temperature=0.8, seed=7),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    "top_k": SamplingParams(temperature=0.8, top_k=50, seed=7),
}
# TPOT over the plain one; sampled: time of a round
BARS = {"logprobs": 1.05, "json_schema": 1.10, **dict.fromkeys(SAMPLED, 1.05)}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string"},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "member"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "items": RECORD})
PEOPLE = (
    (("Ann", 31, "Paris"), ("Bob", 27, "Rome"), ("Cleo", 44, "Oslo"), ("Dan", 38, "Lima")),
    (("Eve", 52, "Berlin"), ("Finn", 19, "Dublin"), ("Gus", 63, "Prague"), ("Hana", 35, "Kyoto")),
    (("Ida", 29, "Bergen"), ("Jon", 41, "Vienna"), ("Kai", 33, "Honolulu"), ("Lea", 57, "Geneva")),
)


def prompts() -> list[str]:
    """Returns prompts at the beginning of a list of records, after two such lists."""
    lists = ["".join(f"People:\n{_listed(people)}\n\n" for people in PEOPLE if people is not left) for left in PEOPLE]
    return [f"{before}People:\n" for before in lists]


def _listed(people: Sequence[tuple[str, int, str]]) -> str:
    records = [{"name": n, "age": a, "city": c, "member": a % 2 == 0} for n, a, c in people]
    return json.dumps(records)


@dataclass(frozen=True)
class Settings:
    runs: int
    max_new_tokens: int
    speculation_length: int
    threads: int
    prompts: int
    logprobs: int
    architectures: tuple[str, ...]
    draft: str
    output: Path


@dataclass
class Outcome:
    """Milliseconds by architecture and feature, in the order measured."""

    tpot: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    per_round: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    cpu_per_round: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    same_tokens: dict[str, dict[str, int]] = field(default_factory=dict)  # prompts
    asked: int = 0


def ratio(times: dict[str, list[float]], feature: str) -> float:
    """Returns the median ratio of requests with the feature to the plain ones before."""
    return statistics.median(b / a for a, b in zip(times["plain"], times[feature], strict=True))


def requests(prompt: str, settings: Settings) -> dict[str, GenerationRequest]:
    """Returns the requests to compare. Ends of sequence are ignored."""
    schema = SamplingParams(structure=Structure(StructureKind.JSON_SCHEMA, SCHEMA))
    plain = GenerationRequest(
        text=prompt, max_new_tokens=settings.max_new_tokens, speculation_length=settings.speculation_length
    )
    return {
        "plain": plain,
        "logprobs": replace(plain, logprobs=settings.logprobs),
        "json_schema": replace(plain, sampling=schema),
        **{name: replace(plain, sampling=by, ignore_end_of_sequence=True) for name, by in SAMPLED.items()},
    }


async def answered(generator: Generator, request: GenerationRequest) -> tuple[tuple[int, ...], float, float, float]:
    """Returns the tokens, the TPOT, and a later round's time and processor time, in milliseconds."""
    tokens: list[int] = []
    first, rounds, began, cpu_began = 0, 0, 0.0, 0.0
    async with contextlib.aclosing(generator.generate(request)) as events:
        async for event in events:
            if isinstance(event, Chunk):
                tokens += event.token_ids
                rounds += 1
                if not first:
                    first, began, cpu_began = len(tokens), time.perf_counter(), time.process_time()
    took, cpu = 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - cpu_began)
    return tuple(tokens), took / (len(tokens) - first), took / (rounds - 1), cpu / (rounds - 1)


async def measure(settings: Settings, outcome: Outcome) -> None:
    batcher = Batcher("benchmark")
    config = ModelConfig(
        Execution(threads=settings.threads),
        Shape(2, 512, settings.speculation_length),
        draft=DraftChoice(settings.draft),
    )
    target, draft = await load_pair(config, batcher)
    generators = {}
    if "fused" in settings.architectures:
        generators["fused"] = fused_generator(target, draft, settings.speculation_length, config.draft)
    if "autoregressive" in settings.architectures:
        generators["autoregressive"] = plain_generator(target)
    asked = [requests(prompt, settings) for prompt in prompts()[: settings.prompts]]
    outcome.asked = len(asked)
    for name, generator in generators.items():
        outcome.tpot[name] = {feature: [] for feature in asked[0]}
        outcome.per_round[name] = {feature: [] for feature in asked[0]}
        outcome.cpu_per_round[name] = {feature: [] for feature in asked[0]}
        outcome.same_tokens[name] = dict.fromkeys(asked[0], 0)
        for run in range(settings.runs + 1):  # the first one warms up
            for each in asked:
                await _in_turn(generator, each, outcome, name, run)
    await batcher.close()


async def _in_turn(
    generator: Generator, each: dict[str, GenerationRequest], outcome: Outcome, name: str, run: int
) -> None:
    plain: tuple[int, ...] = ()
    for feature, request in each.items():
        tokens, tpot, per_round, cpu = await answered(generator, request)
        plain = plain or tokens
        if run == 0:
            outcome.same_tokens[name][feature] += tokens == plain
        else:
            outcome.tpot[name][feature].append(tpot)
            outcome.per_round[name][feature].append(per_round)
            outcome.cpu_per_round[name][feature].append(cpu)


def report(outcome: Outcome) -> list[str]:
    lines = []
    for name, times in outcome.tpot.items():
        for feature, measured in times.items():
            same = f"{outcome.same_tokens[name][feature]}/{outcome.asked}"
            line = f"{name:15} {feature:12} TPOT {statistics.median(measured):7.2f} ms, best {min(measured):7.2f} ms"
            if feature in BARS:
                found, rounds, bar = ratio(times, feature), ratio(outcome.per_round[name], feature), BARS[feature]
                met = (rounds if feature in SAMPLED else found) <= bar
                line += f", ratio to plain {found:.3f}, per round {rounds:.3f} ({'within' if met else 'ABOVE'} the bar"
                line += f" of {bar:.2f})"
                line += f", processor time {ratio(outcome.cpu_per_round[name], feature):.3f}"
            lines.append(f"{line}, same tokens {same}")
    return lines


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = Parser(prog="sampling_features", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.flag("--runs", type=positive, default=5, metavar="N", help="times every prompt is answered (default: 5)")
    parser.flag("--max-new-tokens", type=positive, default=96, metavar="N", help="(default: 96)")
    parser.flag("--speculation-length", type=positive, default=4, metavar="K", help="(default: 4)")
    parser.flag("--threads", type=positive, default=2, metavar="N", help="(default: 2)")
    parser.flag("--prompts", type=positive, default=len(PEOPLE), metavar="N", help="how many (default: %(default)s)")
    parser.flag("--logprobs", type=int, default=5, metavar="N", help="likeliest tokens to report (default: 5)")
    parser.flag("--output", type=Path, default=Path("results/sampling_features.json"), help="(default: %(default)s)")
    parser.flag("--draft", default="model", metavar="KIND", help="model or eagle, the head (default: %(default)s)")
    parser.flag("--architectures", default="fused,autoregressive", help="(default: %(default)s)")
    args = vars(parser.parse_args(argv))
    return Settings(**{**args, "architectures": tuple(args["architectures"].split(","))})


def main(argv: Sequence[str] | None = None) -> int:
    settings, outcome = parse(argv), Outcome()
    document = lambda: {"settings": asdict(settings), "measured": asdict(outcome), "report": report(outcome)}  # noqa: E731
    with kept(settings.output, document, lambda: asdict(outcome)):
        asyncio.run(measure(settings, outcome))
    print("\n".join(report(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

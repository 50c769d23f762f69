"""Measures settling: `python -m benchmarks.settle --engine openai=URL`. Run it on an idle machine.

Each prompt is decoded plainly by the target here, answered by the engine, and settled, one after the other; without
--engine the answers are the target's own with planted differences. Every settled answer must be plain decoding's.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from typing import Any

from benchmarks.arguments import Parser, positive
from tandem.clients.completion import completion_of
from tandem.clients.other_engine import OtherEngine
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.engine.generator import RequestDefaults
from tandem.engine.model_config import ModelConfig
from tandem.rpc.credentials import Credentials
from tandem.runners.load_runner import Execution, Shape
from tandem.services.settling import Settled, settler
from tandem.speculation.types import GenerationRequest, SamplingParams

SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=7)}
STYLES = ("", " Be brief.", " Answer for a child.", " Answer as a list.")  # of 25 prompts, a hundred


class Planted:
    """Answers what it is given, with a share of its tokens replaced."""

    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()
        self.agreement, self._random = 1.0, random.Random(0)

    async def answer(self, request: GenerationRequest) -> tuple[tuple[int, ...], str]:
        said = self._random
        return tuple(t if said.random() < self.agreement else said.randrange(99, 9999) for t in self.tokens), ""


async def measure(args: Any, say: Any) -> bool:
    planted = Planted()
    engine: Any = OtherEngine("engine", args.engine, Credentials(), 60.0) if args.engine else planted
    execution = Execution(dtype=args.dtype, weights=args.weights)
    models = ModelConfig(execution, Shape(slots=1, max_length=1024), args.model)
    first, last = map(int, args.prompts.split(":"))
    prompts = [(each, style) for style in STYLES for each in built_in_prompts()][first:last]
    right = True
    async with settler(models, engine, None, RequestDefaults()) as target:
        say(f"target {target.generator.info.dtype}, engine {args.engine or 'planted'}, {len(prompts)} prompts")
        for name, sampling in SAMPLINGS.items():
            for agreement in (None,) if args.engine else (1.0, 0.95):
                plain_seconds, rows = 0.0, list[tuple[int, int, bool, Settled]]()
                for i, (prompt, style) in enumerate(prompts):
                    request = GenerationRequest(
                        sampling, text=prompt.text + style, chat=prompt.chat, max_new_tokens=args.max_new_tokens
                    )
                    if i == 0:  # the first request of a process takes longer than those after it
                        await completion_of(target.generator.generate(request))
                    began = time.perf_counter()
                    plain = await completion_of(target.generator.generate(request))
                    plain_seconds += time.perf_counter() - began
                    planted.tokens, planted.agreement = plain.token_ids, agreement or 1.0
                    found = await target.settle(request)
                    same = plain.token_ids == found.completion.token_ids
                    rows.append((found.written, found.completion.output_tokens, same, found))
                right = right and all(same for *_, same, _ in rows)
                say(summary(f"{name}, {agreement:g}" if agreement else name, rows, plain_seconds))
    return right


def summary(name: str, rows: list[tuple[int, int, bool, Settled]], plain: float) -> str:
    found = [each for *_, each in rows]
    settling, asking = sum(each.seconds for each in found), sum(each.engine_seconds for each in found)
    agreed = statistics.mean(each.agreed / max(1, each.completion.output_tokens) for each in found)
    return (
        f"{name}: {sum(same for _, _, same, _ in rows)} of {len(rows)} are plain decoding's; "
        f"{sum(each.unchanged for each in found)} unchanged; agreement before the first difference {agreed:.2f} of an "
        f"answer, median {statistics.median(each.agreed for each in found):g} tokens of "
        f"{statistics.mean(tokens for _, tokens, _, _ in rows):.0f}; engine {asking:.1f} s, settling {settling:.1f} s, "
        f"plain decoding {plain:.1f} s: {settling / plain:.2f} of it, {(asking + settling) / max(asking, 1e-9):.2f} of "
        f"the engine alone; failures {sum(bool(each.failure) for each in found)}"
    )


def main() -> int:
    parser = Parser(prog="benchmarks.settle", description=__doc__)
    parser.flag("--engine", help="openai=URL")
    parser.flag("--model", help="the target (default: the embedded one)")
    parser.flag("--dtype", default="auto")
    parser.flag("--weights", default="auto")
    parser.flag("--prompts", default="0:100", help="first and last of 100 (default: %(default)s)")
    parser.flag("--max-new-tokens", type=positive, default=96)
    return 0 if asyncio.run(measure(parser.parse_args(), lambda line: print(line, flush=True))) else 1


if __name__ == "__main__":
    sys.exit(main())

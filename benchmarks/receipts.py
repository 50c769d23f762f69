"""Measures what receipts cost: `python -m benchmarks.receipts`. Run it on an idle machine.

The embedded target decodes the same prompts plainly, with and without a receipt, in turn. Then each receipt is checked:
its whole output is drawn again, as `tandem check` does after loading. Compared are the seconds of checking over those
of generating, and the TPOT with a receipt over that without. Two outputs are made of each prompt, greedy and sampled,
and a forged copy of each receipt, with one token changed, must be found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.arguments import Parser, positive
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.comparison.report.publish import write_atomically
from tandem.engine.batcher import Batcher
from tandem.engine.generator import Generator
from tandem.engine.generators import plain_generator
from tandem.engine.load_models import Loaded, load
from tandem.engine.model_config import ModelConfig
from tandem.receipts.check_command import CheckConfig, checked_by
from tandem.receipts.checking import CheckOutcome, overall
from tandem.receipts.keys import Keys, open_keys
from tandem.receipts.receipt import Signed, prefix_digests, read_signed
from tandem.runners.load_runner import Execution, Shape
from tandem.services.receipts import Receipts, generated
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest, SamplingParams, SpeculationStats

CHECKING_BAR, TPOT_BAR = 0.10, 1.01  # checking over plain decoding; TPOT with a receipt over without
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=7)}


@dataclass(frozen=True, slots=True)
class Run:
    """One output."""

    tpot: float  # seconds, after the first token
    seconds: float
    tokens: int
    receipt: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over prompts and rounds of one kind of sampling."""

    sampling: str
    outputs: int
    tokens: int
    tpot_ms: float
    tpot_with_ms: float
    generating_s: float
    checking_s: float
    right: int
    forged_found: int

    @property
    def checking_ratio(self) -> float:
        return self.checking_s / self.generating_s

    @property
    def tpot_ratio(self) -> float:
        return self.tpot_with_ms / self.tpot_ms


async def generate(generator: Generator, receipts: Receipts, request: GenerationRequest) -> Run:
    began = time.perf_counter()
    first, tokens, receipt = 0.0, 0, ""
    async for event in generated(receipts, generator, request, SpeculationStats()):
        if isinstance(event, Chunk):
            first = first or time.perf_counter()
            tokens += len(event.token_ids)
        elif isinstance(event, GenerationEnd):
            receipt = event.receipt
    ended = time.perf_counter()
    return Run((ended - first) / max(1, tokens - 1), ended - began, tokens, receipt)


async def checking(loaded: Loaded, signed: Signed, prompt: Sequence[int]) -> tuple[CheckOutcome, float]:
    config = CheckConfig(Path(), tuple(prompt), ModelConfig())
    began = time.perf_counter()
    findings = await checked_by(loaded, signed, config)
    return overall(findings), time.perf_counter() - began


def forged(keys: Keys, signed: Signed, vocab_size: int) -> Signed:
    """Returns the receipt with one output token changed, signed again with the server's key."""
    tokens = list(signed.receipt.token_ids)
    at = random.SystemRandom().randrange(len(tokens))
    tokens[at] = (tokens[at] + 1) % vocab_size
    digests = prefix_digests(signed.receipt.prompt_digest, tokens)
    return keys.signed(replace(signed.receipt, token_ids=tuple(tokens), digests=digests), signed.salt)


async def measure(loaded: Loaded, keys: Keys, name: str, prompts: Sequence[str], count: int, rounds: int) -> Figures:
    generator, receipts = plain_generator(loaded), Receipts(keys, "benchmark", dict)
    without: list[Run] = []
    with_receipt: list[Run] = []
    seconds: list[float] = []
    right = found = 0
    for text in prompts:
        plain = GenerationRequest(
            text=text, chat=True, sampling=SAMPLINGS[name], max_new_tokens=count, ignore_end_of_sequence=True
        )
        asked, prompt = replace(plain, receipt=True), await generator.prompt_tokens(plain)
        for _ in range(rounds):
            without.append(await generate(generator, receipts, plain))
            with_receipt.append(await generate(generator, receipts, asked))
            signed = read_signed(with_receipt[-1].receipt)
            outcome, taken = await checking(loaded, signed, prompt)
            right += outcome is CheckOutcome.RIGHT
            seconds.append(taken)
            wrong = forged(keys, signed, loaded.runner.limits.vocab_size)
            found += (await checking(loaded, wrong, prompt))[0] is CheckOutcome.FORGED
    return Figures(
        name,
        len(with_receipt),
        sum(run.tokens for run in with_receipt),
        1000 * statistics.median(run.tpot for run in without),
        1000 * statistics.median(run.tpot for run in with_receipt),
        statistics.median(run.seconds for run in without),
        statistics.median(seconds),
        right,
        found,
    )


def shown(figures: Figures) -> str:
    return (
        f"{figures.sampling}: checking takes {figures.checking_s:.2f} s, generating {figures.generating_s:.2f} s: "
        f"{figures.checking_ratio:.3f} of it (bar {CHECKING_BAR}); TPOT {figures.tpot_with_ms:.2f} ms with a receipt, "
        f"{figures.tpot_ms:.2f} without: {figures.tpot_ratio:.4f} (bar {TPOT_BAR}); {figures.right} of "
        f"{figures.outputs} right, {figures.forged_found} of {figures.outputs} forgeries found"
    )


async def run(args: argparse.Namespace) -> list[Figures]:
    batcher = Batcher("benchmark")
    toy = args.backend == "toy"
    execution = Execution() if toy else Execution(weights=args.weights, threads=args.threads, recertify=False)
    models = ModelConfig(
        execution=execution, shape=Shape(slots=1, max_length=1024), model=args.model, backend=args.backend
    )
    try:
        loaded = await load(models, batcher)
        prompts = [prompt.text for prompt in built_in_prompts()][: args.prompts]
        with tempfile.TemporaryDirectory() as folder:
            keys = open_keys(Path(folder), 90)
            return [
                await measure(loaded, keys, name, prompts, args.max_new_tokens, args.rounds)
                for name in args.sampling or SAMPLINGS
            ]
    finally:
        await batcher.close()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="receipts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.flag("--prompts", type=positive, default=4, metavar="N", help="how many (default: 4)")
    parser.flag("--rounds", type=positive, default=3, metavar="N", help="times each is answered (default: 3)")
    parser.flag("--max-new-tokens", type=positive, default=512, metavar="N", help="(default: 512)")
    parser.flag("--sampling", choices=SAMPLINGS, action="append", help="only this one (default: both)")
    parser.flag("--weights", default="auto", help="auto is as stored (default: auto)")
    parser.flag("--threads", type=positive, metavar="N")
    parser.flag("--model")
    parser.flag("--backend", default="torch")
    parser.flag("--output", type=Path, default=Path("results/receipts.json"), help="(default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    figures = asyncio.run(run(args))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output, json.dumps([asdict(each) for each in figures], indent=1) + "\n")
    print("\n".join(map(shown, figures)))
    met = all(each.checking_ratio <= CHECKING_BAR and each.tpot_ratio <= TPOT_BAR for each in figures)
    return 0 if met and all(each.right == each.forged_found == each.outputs for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Tandem beside transformers, in turn, in one run: `python -m benchmarks.compare_transformers`.

The same target, prompts, dtype, threads and number of tokens on both sides; ours over gRPC with real server processes,
transformers in this process. Prompt by prompt every contender answers once, alone; who goes first rotates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.figures import Agreement, Pairing, Ratio, Sample, agreement, quantile, ratios
from clients.channel import FUSED
from clients.generation import GenerationClient
from comparison.architectures import DISTRIBUTED
from comparison.architectures import FUSED as FUSED_ARCHITECTURE
from comparison.config import DTYPES, ComparisonConfig
from comparison.deployment import Endpoint, baseline_of, deploy, drafting_command
from comparison.environment import these_versions, this_machine
from comparison.servers import Fleet, Server
from comparison.workloads import BUILT_IN, Prompt, built_in_prompts
from speculation.types import Chunk, GenerationRequest, ModelInfo

REPETITIVE = ("counting_and_lists", "code", "extraction")
WARM_UP_TOKENS = 12

PLAIN, FUSED_NGRAM, DISTRIBUTED_NGRAM, FUSED_MODEL = (
    "autoregressive",
    "fused, n-gram",
    "distributed, n-gram",
    "fused, draft model",
)
GENERATE, LOOKUP, ASSISTED = "transformers generate", "transformers prompt lookup", "transformers assistant"

PAIRINGS = (
    Pairing("plain decoding", PLAIN, GENERATE),
    Pairing("prompt lookup, draft beside the target", FUSED_NGRAM, LOOKUP),
    Pairing("prompt lookup, draft over loopback", DISTRIBUTED_NGRAM, LOOKUP),
    Pairing("draft model", FUSED_MODEL, ASSISTED),
    Pairing("fused over our own plain decoding", FUSED_NGRAM, PLAIN),
    Pairing("the same, repetitive prompts only", FUSED_NGRAM, PLAIN, REPETITIVE),
)


@dataclass(frozen=True, slots=True)
class Answered:
    """New token ids, and when (perf_counter) the first of them had come, and how many came then."""

    token_ids: tuple[int, ...]
    first_came: float
    first_tokens: int


Answer = Callable[[Sequence[int], int], Awaitable[Answered]]
"""(prompt, new tokens) -> the answer."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody who answers prompts."""

    name: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that one run found out."""

    samples: tuple[Sample, ...]
    servers: dict[str, ModelInfo]
    attention: str
    threads: int
    seconds: float


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="compare_transformers", description=__doc__, allow_abbrev=False)
    parser.flag("--dtype", default="auto", choices=DTYPES, help="of every model (default: the servers' own choice)")
    parser.flag("--threads", type=positive, help="CPU threads of every model (default: torch's choice)")
    parser.flag("--max-new-tokens", type=positive, default=64, metavar="N", help="(default: 64)")
    parser.flag("--workloads", default=",".join(BUILT_IN), metavar="KINDS", help="(default: %(default)s)")
    parser.flag("--prompts-per-workload", type=positive, default=3, metavar="N", help="(default: 3)")
    parser.flag("--speculation-length", type=positive, default=5, metavar="K", help="draft tokens a round (default: 5)")
    parser.flag("--runs", type=positive, default=1, metavar="N", help="times every prompt is answered (default: 1)")
    parser.flag("--sequence-length", type=positive, default=512, metavar="N", help="of our servers (default: 512)")
    parser.flag("--draft-model", metavar="DIR", help="also compare speculation with this draft model on both sides")
    parser.flag("--output", type=Path, default=Path("results/compare_transformers.json"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        args.prompts = built_in_prompts(args.workloads.split(","), args.prompts_per_workload)
        args.config = _config(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _config(args: argparse.Namespace) -> ComparisonConfig:
    return ComparisonConfig(
        prompts=args.prompts,
        output_dir=args.output.parent,
        max_new_tokens=args.max_new_tokens,
        speculation_length=args.speculation_length,
        sequence_length=args.sequence_length,
        threads=args.threads,
        dtype=args.dtype,
        draft="ngram",
    )


# --- our side ---


@dataclass(frozen=True)
class _Starting:
    """A fleet that says what it starts."""

    fleet: Fleet
    say: Callable[[str], None]

    async def start(self, name: str, command: Sequence[str]) -> Server:
        server = await self.fleet.start(name, command)
        self.say(f"{name} is ready on {server.address} after {server.startup_seconds:.1f} s")
        return server


async def _describe(address: str, service: str) -> ModelInfo:
    async with GenerationClient.connect(address, service) as client:
        return await client.model_info()


async def _our_endpoints(args: argparse.Namespace, starter: _Starting) -> dict[str, Endpoint]:
    endpoints = await deploy(args.config, starter, _describe)
    by_architecture = {endpoint.architecture: endpoint for endpoint in endpoints}
    plain = baseline_of(endpoints)
    assert plain is not None
    ours = {
        PLAIN: plain,
        FUSED_NGRAM: by_architecture[FUSED_ARCHITECTURE],
        DISTRIBUTED_NGRAM: by_architecture[DISTRIBUTED],
    }
    if args.draft_model:
        config = replace(args.config, draft="model", draft_model=args.draft_model)
        server = await starter.start("fused_draft_model", drafting_command(config, "fused_target"))
        ours[FUSED_MODEL] = Endpoint(FUSED_ARCHITECTURE, server.address, await _describe(server.address, FUSED))
    return ours


def _ours(name: str, client: GenerationClient, k: int) -> Contender:
    async def answer(prompt: Sequence[int], max_new_tokens: int) -> Answered:
        request = GenerationRequest(
            token_ids=tuple(prompt),
            max_new_tokens=max_new_tokens,
            speculation_length=k,
            ignore_end_of_sequence=True,
        )
        tokens: list[int] = []
        came, first = 0.0, 0
        async with contextlib.aclosing(client.generate(request)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    tokens += event.token_ids
                    if tokens and not first:
                        came, first = time.perf_counter(), len(tokens)
        return Answered(tuple(tokens), came, first)

    return Contender(name, answer)


# --- transformers' side ---


def _stock(args: argparse.Namespace, dtype: str) -> tuple[list[Contender], Any]:
    """Imported late: --help needs no torch."""
    from benchmarks.stock import StockModel
    from models.checkpoints import find
    from models.gguf_cache import unpacked

    model = StockModel(unpacked(find(None)), dtype, args.threads)
    assistances: dict[str, dict[str, Any]] = {
        GENERATE: {},
        LOOKUP: {"prompt_lookup_num_tokens": args.speculation_length},
    }
    if args.draft_model:
        draft = StockModel(unpacked(find(args.draft_model)), dtype, args.threads)
        assistances[ASSISTED] = {"assistant_model": draft.as_assistant(args.speculation_length)}

    def contender(name: str, assistance: dict[str, Any]) -> Contender:
        async def answer(prompt: Sequence[int], max_new_tokens: int) -> Answered:
            token_ids, first = model.generate(prompt, max_new_tokens, **assistance)
            return Answered(token_ids, first.came, first.count)

        return Contender(name, answer)

    return [contender(name, assistance) for name, assistance in assistances.items()], model


def _encode(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Both sides are given ids, so that neither pays for tokenization and both see the same prompt."""
    from models.assembly import load_tokenizer
    from models.checkpoints import find

    tokenizer = load_tokenizer(find(None))
    return {prompt.name: tokenizer.encode(prompt.text, prompt.chat) for prompt in prompts}


# --- the run ---


async def measure(args: argparse.Namespace, say: Callable[[str], None]) -> Outcome:
    began = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare_transformers")))
        fleet = await stack.enter_async_context(Fleet(logs, concurrency=1))
        endpoints = await _our_endpoints(args, _Starting(fleet, say))
        contenders = [
            _ours(
                name,
                await stack.enter_async_context(GenerationClient.connect(e.address, e.architecture.service)),
                args.speculation_length,
            )
            for name, e in endpoints.items()
        ]
        theirs, stock = _stock(args, endpoints[PLAIN].model.dtype)
        say(f"transformers: {endpoints[PLAIN].model.dtype}, {stock.threads} threads, {stock.attention} attention")
        samples = await _measure_all(args, [*contenders, *theirs], say)
        models = {name: endpoint.model for name, endpoint in endpoints.items()}
        return Outcome(tuple(samples), models, stock.attention, stock.threads, time.perf_counter() - began)


async def _measure_all(
    args: argparse.Namespace, contenders: Sequence[Contender], say: Callable[[str], None]
) -> list[Sample]:
    encoded = _encode(args.prompts)
    first = encoded[args.prompts[0].name]
    for contender in contenders:
        await contender.answer(first, min(WARM_UP_TOKENS, args.max_new_tokens))
    samples: list[Sample] = []
    for turn, (run, prompt) in enumerate((run, prompt) for run in range(args.runs) for prompt in args.prompts):
        said: list[str] = []
        for contender in _rotated(contenders, turn):
            sent = time.perf_counter()
            answered = await contender.answer(encoded[prompt.name], args.max_new_tokens)
            seconds = time.perf_counter() - sent
            tokens = answered.token_ids
            if len(tokens) != args.max_new_tokens:
                raise RuntimeError(f"{contender.name} gave {len(tokens)} tokens on {prompt.name}")
            first_seconds = answered.first_came - sent
            samples.append(
                Sample(
                    contender.name, prompt.name, prompt.kind, run, tokens, seconds, first_seconds, answered.first_tokens
                )
            )
            said.append(f"{contender.name} {samples[-1].ms_per_token:.1f}")
        say(f"[{turn + 1}/{args.runs * len(args.prompts)}] {prompt.name}, ms per token: " + "; ".join(said))
    return samples


def _rotated(contenders: Sequence[Contender], turn: int) -> list[Contender]:
    first = turn % len(contenders)
    return [*contenders[first:], *contenders[:first]]


# --- the report ---


def ratio_table(found: Sequence[Ratio]) -> Table:
    table = Table(title="Ours against theirs: ratios of medians, above 1 where ours is faster", title_justify="left")
    table.add_column("pairing")
    for column in ("ours\nms/token", "ours\ntokens/s", "theirs\nms/token", "theirs\ntokens/s", "ratio", "ours faster"):
        table.add_column(column, justify="right")
    for ratio in found:
        color = "green" if ratio.speedup >= 1 else "bold red"
        table.add_row(
            f"{ratio.pairing.title}\n  {ratio.pairing.ours} / {ratio.pairing.theirs}",
            f"{ratio.ours_ms:.1f}",
            f"{1000 / ratio.ours_ms:.1f}",
            f"{ratio.theirs_ms:.1f}",
            f"{1000 / ratio.theirs_ms:.1f}",
            f"[{color}]{ratio.speedup:.2f}x[/{color}]",
            f"{ratio.faster} of {ratio.total}",
        )
    return table


def contender_table(samples: Sequence[Sample]) -> Table:
    table = Table(title="Each contender, ms per token end to end", title_justify="left")
    table.add_column("contender")
    for column in (
        "p25",
        "median",
        "p75",
        "tokens/s\nat median",
        "first token\nms",
        "ms per token\nafter it",
        "tokens of\ngenerate",
    ):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(sample.contender for sample in samples):
        mine = [sample for sample in samples if sample.contender == name]
        times = [sample.ms_per_token for sample in mine]
        later = [ms for sample in mine if (ms := sample.ms_per_later_token) is not None]
        same = agreement(samples, name, GENERATE)
        table.add_row(
            name,
            *(f"{quantile(times, q):.1f}" for q in (0.25, 0.5, 0.75)),
            f"{1000 / statistics.median(times):.1f}",
            f"{1000 * statistics.median(sample.first_seconds for sample in mine):.0f}",
            f"{statistics.median(later):.1f}" if later else "-",
            "ref" if name == GENERATE else f"{same.count}/{same.total}",
        )
    return table


def kind_table(samples: Sequence[Sample]) -> Table:
    names = list(dict.fromkeys(sample.contender for sample in samples))
    table = Table(title="Median ms per token by kind of prompt", title_justify="left")
    table.add_column("kind")
    for name in names:
        table.add_column(name.replace(" ", "\n", 1), justify="right")
    for kind in dict.fromkeys(sample.kind for sample in samples):
        medians = (
            statistics.median(s.ms_per_token for s in samples if s.kind == kind and s.contender == name)
            for name in names
        )
        table.add_row(kind, *(f"{median:.1f}" for median in medians))
    return table


def _agreements(samples: Sequence[Sample]) -> dict[str, Agreement]:
    names = dict.fromkeys(sample.contender for sample in samples)
    return {name: agreement(samples, name, GENERATE) for name in names if name != GENERATE}


def document(args: argparse.Namespace, outcome: Outcome) -> dict[str, Any]:
    """What --output holds."""
    settings = (
        "max_new_tokens",
        "speculation_length",
        "runs",
        "prompts_per_workload",
        "sequence_length",
        "draft_model",
    )
    return {
        "schema_version": 1,
        "machine": asdict(this_machine()),
        "versions": asdict(these_versions()),
        "settings": {name: getattr(args, name) for name in settings},
        "dtype": outcome.servers[PLAIN].dtype,
        "threads": outcome.threads,
        "attention": outcome.attention,
        "seconds": outcome.seconds,
        "servers": {name: asdict(info) for name, info in outcome.servers.items()},
        "ratios": [asdict(ratio) | {"speedup": ratio.speedup} for ratio in ratios(outcome.samples, PAIRINGS)],
        "identical_to_generate": {name: asdict(same) for name, same in _agreements(outcome.samples).items()},
        "samples": [asdict(sample) for sample in outcome.samples],
    }


def report(args: argparse.Namespace, outcome: Outcome, console: Console) -> None:
    info = outcome.servers[PLAIN]
    console.print(f"machine: {this_machine()}", highlight=False)
    console.print(
        f"{info.model_name}, {info.dtype}, {outcome.threads} threads; {len(args.prompts)} prompts x {args.runs},"
        f" {args.max_new_tokens} new tokens each (end-of-sequence ignored), greedy, k = {args.speculation_length};"
        f" transformers: {outcome.attention}, DynamicCache, in process; ours: over gRPC on loopback,"
        f" plain decoding at width {info.plain_width}",
        highlight=False,
    )
    for table in (
        ratio_table(ratios(outcome.samples, PAIRINGS)),
        contender_table(outcome.samples),
        kind_table(outcome.samples),
    ):
        console.print(table)
    for name, same in _agreements(outcome.samples).items():
        if same.parted:
            console.print(f"{name} left the tokens of generate: {'; '.join(same.parted)}", highlight=False)
    console.print(f"took {outcome.seconds:.0f} s; wrote {args.output}", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    outcome = asyncio.run(measure(args, lambda text: print(text, file=sys.stderr, flush=True)))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document(args, outcome), indent=1) + "\n")
    report(args, outcome, Console() if sys.stdout.isatty() else Console(width=130))
    return 0


if __name__ == "__main__":
    sys.exit(main())

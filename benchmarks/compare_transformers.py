"""Compares Tandem with transformers in one run: `python -m benchmarks.compare_transformers`.

Both use the same target, prompts, dtype, threads and number of tokens; Tandem runs in server processes over gRPC,
transformers in this process. For every prompt, each contender answers once, alone; the order rotates.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.contenders import answer_in_turn, connect, describe, encode, ready
from benchmarks.figures import Agreement, Pairing, Ratio, Sample, agreement, ratios
from benchmarks.keeping import kept
from benchmarks.tables import contender_table, kind_table
from tandem.comparison.measuring.architectures import DISTRIBUTED
from tandem.comparison.measuring.architectures import FUSED as FUSED_ARCHITECTURE
from tandem.comparison.measuring.commands import server_command
from tandem.comparison.measuring.config import DTYPES, ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint, baseline_of, deploy
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.prompts import BUILT_IN
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.rpc.channel import FUSED
from tandem.speculation.types import ModelInfo

if TYPE_CHECKING:
    from benchmarks.stock import StockContender, StockModel

REPETITIVE = ("counting_and_lists", "code", "extraction")

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
class Outcome:
    """The measurements of one run."""

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


# --- Tandem ---


async def _our_endpoints(args: argparse.Namespace, fleet: Fleet) -> dict[str, Endpoint]:
    endpoints = await deploy(args.config, fleet, describe)
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
        server = await fleet.start("fused_draft_model", server_command(config, "fused_target"))
        ours[FUSED_MODEL] = Endpoint(FUSED_ARCHITECTURE, server.address, await describe(server.address, FUSED))
    return ours


# --- transformers ---


def _stock(args: argparse.Namespace, dtype: str) -> tuple[list[StockContender], StockModel]:
    """Loads the models. Imports torch only here, since --help does not need it."""
    from benchmarks.stock import StockContender, StockModel
    from tandem.checkpoints.gguf_cache import unpacked
    from tandem.checkpoints.locate import find

    model = StockModel(unpacked(find(None)), dtype, args.threads)
    assistances: dict[str, dict[str, Any]] = {
        GENERATE: {},
        LOOKUP: {"prompt_lookup_num_tokens": args.speculation_length},
    }
    if args.draft_model:
        draft = StockModel(unpacked(find(args.draft_model)), dtype, args.threads)
        assistances[ASSISTED] = {"assistant_model": draft.as_assistant(args.speculation_length)}

    return [StockContender(name, model, assistance) for name, assistance in assistances.items()], model


# --- the run ---


async def measure(args: argparse.Namespace, say: Callable[[str], None], samples: list[Sample]) -> Outcome:
    """Appends each answer to `samples` at once."""
    began = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare_transformers")))
        fleet = await stack.enter_async_context(Fleet(logs, concurrency=1, on_ready=ready(say)))
        endpoints = await _our_endpoints(args, fleet)
        contenders = await connect(stack, endpoints, args.speculation_length)
        theirs, stock = _stock(args, endpoints[PLAIN].model.dtype)
        say(f"transformers: {endpoints[PLAIN].model.dtype}, {stock.threads} threads, {stock.attention} attention")
        await answer_in_turn(
            [*contenders, *theirs], args.prompts, encode(args.prompts), args.max_new_tokens, args.runs, say, samples
        )
        models = {name: endpoint.model for name, endpoint in endpoints.items()}
        return Outcome(tuple(samples), models, stock.attention, stock.threads, time.perf_counter() - began)


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


def _agreements(samples: Sequence[Sample]) -> dict[str, Agreement]:
    names = dict.fromkeys(sample.contender for sample in samples)
    return {name: agreement(samples, name, GENERATE) for name in names if name != GENERATE}


def document(args: argparse.Namespace, outcome: Outcome) -> dict[str, Any]:
    """Returns the document that --output writes."""
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
        "ratios": [asdict(ratio) for ratio in ratios(outcome.samples, PAIRINGS)],
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
        contender_table(outcome.samples, GENERATE),
        kind_table(outcome.samples),
    ):
        console.print(table)
    for name, same in _agreements(outcome.samples).items():
        if same.parted:
            console.print(f"{name} left the tokens of generate: {'; '.join(same.parted)}", highlight=False)
    console.print(f"took {outcome.seconds:.0f} s; wrote {args.output}", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    samples: list[Sample] = []
    outcome: Outcome | None = None

    def raw() -> dict[str, Any]:
        return {"samples": [asdict(sample) for sample in samples]}

    with kept(args.output, lambda: document(args, outcome) if outcome else raw(), raw):
        outcome = asyncio.run(measure(args, lambda text: print(text, file=sys.stderr, flush=True), samples))
    report(args, outcome, Console() if sys.stdout.isatty() else Console(width=130))
    return 0


if __name__ == "__main__":
    sys.exit(main())

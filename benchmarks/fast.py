"""Compares Tandem with the memory-bandwidth limit, llama.cpp, OpenVINO and vLLM: `python -m benchmarks.fast`.

Contenders take turns; the limit is measured in the same run. See benchmarks/README.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks import against_plain, bandwidth, vllm_peer
from benchmarks.contenders import Contender, Crowd, Ours, answer_in_turn, connect, describe, encode, ready
from benchmarks.crowds import measure_load
from benchmarks.fast_peers import Llama, TargetFiles, prepare_llama, start_openvino, start_vllm, what_llama_said
from benchmarks.fast_report import Outcome, document, report
from benchmarks.fast_settings import PROMPT_TOKENS, Settings, parse
from benchmarks.fast_table import quoted_table
from benchmarks.formats import DISTRIBUTED, Format
from benchmarks.keeping import kept
from benchmarks.others import watch
from benchmarks.prompt_speed import measure_prompts
from tandem.comparison.measuring import architectures
from tandem.comparison.measuring.deployment import Endpoint, baseline_of, deploy
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.comparison.report.publish import write_atomically

CROWD_KINDS = ("counting_and_lists", "code", "chat", "prose")

Say = Callable[[str], None]


async def measure(settings: Settings, outcome: Outcome, say: Say) -> None:
    """Measures the requested parts and adds each to the outcome at once."""
    began = time.perf_counter()
    wanted = set(settings.parts)
    if "bandwidth" in wanted:
        outcome.readings = bandwidth.measure(settings.threads)
        _add_limits(outcome, settings.threads)
        best = bandwidth.bandwidth_of(outcome.readings, settings.threads)
        say(f"bandwidth: {best / 1e9:.1f} GB/s with {settings.threads} threads")
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fast")))
        workers: list[vllm_peer.Peer] = []
        llama: Llama | None = None
        if "peers" in wanted:
            files = TargetFiles(logs, threads=settings.threads)
            llama = prepare_llama(settings, files, outcome, say)
            workers = await start_vllm(settings, logs, stack, outcome, say)
            workers += await start_openvino(settings, files, stack, outcome, say)
        if wanted & {"single", "prompts"}:
            await _single(settings, logs, workers, llama, outcome, say)
        if "concurrency" in wanted:
            await _crowded(settings, logs, workers, llama, outcome, say)
    outcome.seconds = time.perf_counter() - began


def _add_limits(outcome: Outcome, threads: int) -> None:
    from tandem.checkpoints.gguf_cache import unpacked
    from tandem.checkpoints.locate import find

    best, folder = bandwidth.bandwidth_of(outcome.readings, threads), Path(unpacked(find(None)).folder)
    outcome.limit = bandwidth.limit_of(folder, "bfloat16", best)
    outcome.limits["int8"] = bandwidth.limit_of(folder, "float32", best, bandwidth.INT8_BYTES)


async def _ours(
    settings: Settings, logs: Path, stack: contextlib.AsyncExitStack, outcome: Outcome, say: Say, batch: int | None
) -> dict[str, Ours]:
    found: dict[str, Ours] = {}
    for form in settings.formats:
        found |= await _ours_in(form, settings, logs, stack, outcome, say, batch)
    return found


async def _ours_in(
    form: Format,
    settings: Settings,
    logs: Path,
    stack: contextlib.AsyncExitStack,
    outcome: Outcome,
    say: Say,
    batch: int | None,
) -> dict[str, Ours]:
    fleet = await stack.enter_async_context(Fleet(logs / form.weights, concurrency=1, on_ready=ready(say)))
    endpoints = await deploy(settings.servers(form.weights, batch), fleet, describe)
    by_architecture = {endpoint.architecture: endpoint for endpoint in endpoints}
    plain = baseline_of(endpoints)
    assert plain is not None
    named: dict[str, Endpoint] = {form.plain: plain, form.fused: by_architecture[architectures.FUSED]}
    if architectures.DISTRIBUTED in by_architecture:
        named[DISTRIBUTED] = by_architecture[architectures.DISTRIBUTED]
    outcome.servers |= {name: endpoint.model for name, endpoint in named.items()}
    return {ours.name: ours for ours in await connect(stack, named, settings.speculation_length)}


async def _single(
    settings: Settings,
    logs: Path,
    workers: Sequence[vllm_peer.Peer],
    llama: Llama | None,
    outcome: Outcome,
    say: Say,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        ours = await _ours(settings, logs, stack, outcome, say, None)
        others = await llama.start(1, stack, outcome, say) if llama else []
        everybody: list[Contender] = [*ours.values(), *workers, *others]
        if "single" in settings.parts:
            encoded = encode(settings.prompts)
            outcome.contexts = {name: len(ids) + settings.max_new_tokens / 2 for name, ids in encoded.items()}
            _note_others(outcome, "requests alone", say)
            await answer_in_turn(
                everybody, settings.prompts, encoded, settings.max_new_tokens, settings.runs, say, outcome.samples
            )
            outcome.remarks += what_llama_said(others)
        if "prompts" in settings.parts:
            _note_others(outcome, "prompts", say)
            runs = settings.runs * len(settings.prompts)
            await measure_prompts(everybody, _text(), PROMPT_TOKENS, runs, say, outcome.speeds)


async def _crowded(
    settings: Settings,
    logs: Path,
    workers: Sequence[vllm_peer.Peer],
    llama: Llama | None,
    outcome: Outcome,
    say: Say,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        slots = max(settings.levels)
        ours = await _ours(settings, logs, stack, outcome, say, slots)
        prompts = list(encode(built_in_prompts(CROWD_KINDS, 1)).values())
        others = await llama.start(slots, stack, outcome, say) if llama else []
        _note_others(outcome, "many requests", say)
        crowd: list[Crowd] = [*ours.values(), *workers, *others]
        await measure_load(crowd, prompts, settings.levels, settings.crowd_tokens, say, outcome.loads)


def _text() -> list[int]:
    """Returns the token ids of all built-in prompts in sequence."""
    return list(itertools.chain.from_iterable(encode(built_in_prompts()).values()))


def _note_others(outcome: Outcome, part: str, say: Say) -> None:
    """Measures the idle machine's load: other programs, or a spinning contender."""
    share = watch()
    if share is not None:
        outcome.busy[part] = share
        say(f"{part}: with every contender idle, {share:.0%} of the machine is busy")


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(argv)
    outcome = Outcome(settings.threads, settings.max_new_tokens)
    with kept(settings.output, lambda: document(asdict(settings), outcome), lambda: asdict(outcome)):
        asyncio.run(measure(settings, outcome, lambda text: print(text, file=sys.stderr, flush=True)))
        if "compare" in settings.parts:
            quick = ("--prompts-per-workload", "1", "--max-new-tokens", "16") if settings.quick else ()
            found = against_plain.measure(settings.output.with_suffix(""), quick)
            outcome.against_plain = against_plain.plain_ratio_bars(found)
    report(outcome, Console() if sys.stdout.isatty() else Console(width=130))
    page = write_atomically(settings.output.with_suffix(".md"), quoted_table(outcome))
    print(f"{quoted_table(outcome)}\ntook {outcome.seconds:.0f} s; wrote {settings.output} and {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures long contexts and the memory of KV slots: `python -m benchmarks.long_context [--against CHECKOUT]`.

Each part runs in a process of its own, on this checkout and on the other in turn. `speed`: a long prompt is processed
beside a running short request: its time to first token, the short one's longest gap, then tokens per second behind the
long prompt, and the memory of the process. `memory`: one long and several short requests at once, in slots of the full
length; here the slots share --kv-cache-mb, if the checkout knows that.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept

MIB = 2**20
SHORT_PROMPT, SHORT_ANSWER = 64, 32


@dataclass(frozen=True)
class Settings:
    """The settings of one run. `part`: what a child measures; empty in the process that reports."""

    contexts: tuple[int, ...]
    long: int
    short: int
    new_tokens: int
    kv_cache_mb: int
    threads: int | None
    weights: str
    against: Path | None
    output: Path
    part: str = ""


def resident_mib() -> float:
    """Returns the resident memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / MIB


async def loaded(settings: Settings, slots: int, length: int) -> tuple[Any, Any]:
    """The engine of the embedded target with slots of `length` tokens, and its batcher."""
    from tandem.engine.batcher import Batcher
    from tandem.engine.loading import load
    from tandem.engine.model_config import ModelConfig
    from tandem.runners.loading import Execution, Shape

    batcher = Batcher("benchmark")
    execution = Execution(threads=settings.threads, weights=settings.weights)
    return (await load(ModelConfig(execution, Shape(slots, length, 4)), batcher)).engine, batcher


def some(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=count)


async def stepped(verifier: Any, tokens: list[int]) -> float:
    """Decodes a token; returns when it came."""
    from tandem.speculation.types import Verdict

    verdict: Verdict = await verifier.verify(tokens, ())
    tokens += verdict.token_ids
    return time.perf_counter()


async def speed(settings: Settings) -> list[dict[str, float]]:
    from tandem.engine.sequences import LocalVerifier
    from tandem.speculation.types import Request

    engine, batcher = await loaded(settings, 2, max(settings.contexts))
    empty, rows = resident_mib(), []
    for context in settings.contexts:
        short, tokens = LocalVerifier(engine, Request()), some(SHORT_PROMPT, 1)
        await short.open(tokens)
        times = [await stepped(short, tokens) for _ in range(9)]
        alone = statistics.median(b - a for a, b in itertools.pairwise(times))
        long, prompt = LocalVerifier(engine, Request()), some(context - settings.new_tokens - 1, context)
        began = time.perf_counter()

        async def first(verifier: Any = long, prompt: list[int] = prompt) -> float:
            await verifier.open(prompt)
            return await stepped(verifier, prompt)

        arriving, times = asyncio.ensure_future(first()), [began]
        while not arriving.done():
            times.append(await stepped(short, tokens))
            del tokens[SHORT_PROMPT * 4 :]  # stays short: rolls back
        ttft = await arriving - began
        await short.close()
        started = time.perf_counter()
        for _ in range(settings.new_tokens - 1):
            ended = await stepped(long, prompt)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        rows.append(
            {
                "context": context,
                "first_token_seconds": ttft,
                "tokens_per_second": (settings.new_tokens - 1) / (ended - started),
                "short_alone_ms": 1000 * alone,
                "short_longest_gap_ms": 1000 * max(gaps),
                "short_median_gap_ms": 1000 * statistics.median(gaps),
                "resident_mib": resident_mib(),
                "grown_mib": resident_mib() - empty,
            }
        )
        await long.close()
    await batcher.close()
    return rows


async def memory(settings: Settings) -> list[dict[str, float]]:
    from tandem.engine.kv_memory import limit_kv_memory
    from tandem.engine.sequences import LocalVerifier
    from tandem.speculation.types import Request

    engine, batcher = await loaded(settings, settings.short + 1, max(settings.contexts))
    limit_kv_memory(engine.slots, batcher, [engine.runner], settings.kv_cache_mb * MIB)
    empty, began, most = resident_mib(), time.perf_counter(), 0.0

    async def one(prompt: list[int], count: int) -> None:
        nonlocal most
        verifier = LocalVerifier(engine, Request(max_new_tokens=count))
        await verifier.open(prompt)
        for _ in range(count):
            await stepped(verifier, prompt)
        most = max(most, resident_mib())
        await verifier.close()

    shorts = (one(some(SHORT_PROMPT, i), SHORT_ANSWER) for i in range(settings.short))
    await asyncio.gather(one(some(settings.long, 0), settings.new_tokens), *shorts)
    seconds = time.perf_counter() - began
    await batcher.close()
    return [{"slots": engine.slots.count, "empty_mib": empty, "most_mib": most, "seconds": seconds}]


def child(settings: Settings, root: Path, part: str) -> list[dict[str, float]]:
    """Runs a part in a process of its own, with the code of `root`; returns its rows."""
    given = {**asdict(settings), "part": part, "output": str(settings.output), "against": None}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), json.dumps(given)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).resolve().parents[1]}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows: list[dict[str, float]] = json.loads(ran.stdout.splitlines()[-1])
    return rows


def measure(settings: Settings, found: dict[str, Any]) -> None:
    roots = {"here": Path(__file__).resolve().parents[1]}
    if settings.against:
        roots["against"] = settings.against.resolve()
    for part in ("speed", "memory"):
        for name, root in roots.items():
            found.setdefault(part, {})[name] = child(settings, root, part)


def report(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, rows in found.get("speed", {}).items():
        lines += [
            f"{name:8} {row['context']:5.0f} tokens: first token {row['first_token_seconds']:7.2f} s,"
            f" then {row['tokens_per_second']:6.1f} tokens/s; a short request beside it: longest gap"
            f" {row['short_longest_gap_ms']:6.0f} ms, median {row['short_median_gap_ms']:5.0f},"
            f" alone {row['short_alone_ms']:5.1f}; memory {row['resident_mib']:6.0f} MiB"
            for row in rows
        ]
    lines += [
        f"{name:8} {row['slots']:.0f} slots: {row['empty_mib']:6.0f} MiB empty, {row['most_mib']:6.0f} MiB at most,"
        f" {row['seconds']:6.1f} s"
        for name, rows in found.get("memory", {}).items()
        for row in rows
    ]
    return [*lines, *_ratios(found)]


def _ratios(found: dict[str, Any]) -> list[str]:
    lines, speeds, memories = [], found.get("speed", {}), found.get("memory", {})
    for here, there in zip(speeds.get("here", ()), speeds.get("against", ()), strict=False):
        parts = [
            f"{name} {here[key] / there[key]:.3f}"
            for name, key in (
                ("time to first token", "first_token_seconds"),
                ("tokens/s", "tokens_per_second"),
                ("longest gap", "short_longest_gap_ms"),
                ("memory", "resident_mib"),
            )
        ]
        lines.append(f"here / against at {here['context']:.0f} tokens: {', '.join(parts)}")
    for here, there in zip(memories.get("here", ()), memories.get("against", ()), strict=False):
        lines.append(f"here / against, memory of one long and many short: {here['most_mib'] / there['most_mib']:.3f}")
    return lines


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = Parser(prog="long_context", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    contexts = lambda text: tuple(positive(part) for part in text.split(","))  # noqa: E731
    parser.flag("--contexts", type=contexts, default=(512, 2048, 8192), metavar="LIST", help="(default: 512,2048,8192)")
    parser.flag("--long", type=positive, default=2048, metavar="N", help="prompt of the long request (default: 2048)")
    parser.flag("--short", type=positive, default=16, metavar="N", help="short requests beside it (default: 16)")
    parser.flag("--new-tokens", type=positive, default=24, metavar="N", help="of a long request (default: 24)")
    parser.flag("--kv-cache-mb", type=positive, default=512, metavar="N", help="(default: 512)")
    parser.flag("--threads", type=positive, metavar="N", help="threads of a step (default: torch's choice)")
    parser.flag("--weights", default="auto", help="(default: auto)")
    parser.flag("--against", type=Path, metavar="CHECKOUT", help="another checkout of Tandem, measured in turn")
    parser.flag("--output", type=Path, default=Path("results/long_context.json"), help="(default: %(default)s)")
    return Settings(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    settings, found = parse(argv), dict[str, Any]()
    document = lambda: {"settings": asdict(settings), "measured": found, "report": report(found)}  # noqa: E731
    with kept(settings.output, document, lambda: found):
        measure(settings, found)
    print("\n".join(report(found)))
    return 0


def measured_part(given: str) -> int:
    """What a child process does: prints the rows of its part."""
    settings = Settings(**json.loads(given))
    rows = asyncio.run({"speed": speed, "memory": memory}[settings.part](settings))
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(measured_part(sys.argv[1]) if len(sys.argv) == 2 and sys.argv[1].startswith("{") else main())

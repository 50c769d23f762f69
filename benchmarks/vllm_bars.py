"""Measures the bars on vLLM's CPU build with remote drafts, and prints which are met.

    .venv/bin/python -m benchmarks.vllm_bars --vllm-python .venv-vllm/bin/python [--parts times identity hung]

Measurements are appended to --output; a restart measures the missing ones. Only `times` needs an idle machine: `hung`
allows --margin-ms beyond the budget for a waiting thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import timed_drafter, vllm_drafts
from benchmarks.bars import Bar
from benchmarks.contenders import encode
from benchmarks.peers import PeerFailed
from benchmarks.vllm_drafts import NEVER_WAITING, OWN, PLAIN, WAITING, Timed
from benchmarks.vllm_peer import Peer
from tandem.comparison.measuring.servers import Fleet, Server, ServerFailed
from tandem.comparison.measuring.workloads import built_in_prompts

FORMS = (WAITING, NEVER_WAITING)
REPETITIVE = ("counting_and_lists", "code", "extraction")
TIMES, IDENTITY, HUNG = "times", "identity", "hung"
PARTS = (TIMES, IDENTITY, HUNG)
TEXTS, TEXT_TOKENS, LONGEST_PROMPT = 40, 32, 96
STEPS, HUNG_TOKENS = 1000, 64
FAST_MS, SLOW_MS = 20.0, 100.0
BUSY_LOAD = 0.5  # of other programs, from which the machine is not idle


class Kept:
    """The output file: a line per part, key and result."""

    def __init__(self, path: Path, setting: dict[str, Any]) -> None:
        """Reads an earlier run's file. Raises ValueError if its settings differ."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._found: list[dict[str, Any]] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
                self._found.append(json.loads(line))
        if path.exists() and not path.read_text().endswith("\n"):
            path.write_text(path.read_text() + "\n")
        if before := self.of("settings"):
            if before[0] != setting:
                raise ValueError(f"output: {path} was measured with other settings: {before[0]}")
        else:
            self.add("settings", setting)

    def of(self, part: str) -> list[dict[str, Any]]:
        return [one["found"] for one in self._found if one["part"] == part]

    def add(self, part: str, *found: dict[str, Any]) -> None:
        lines = [{"part": part, "found": one} for one in found]
        with self._path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._found += lines


def timed(kept: Kept) -> list[Timed]:
    return [Timed(**{**one, "token_ids": tuple(one["token_ids"])}) for one in kept.of(TIMES)]


async def measure_times(args: argparse.Namespace, kept: Kept) -> None:
    """Times missing prompts on every engine; a turn of all engines is kept whole or not at all."""
    found = timed(kept)
    if not vllm_drafts.missing(args, found):
        return
    kept.add("load", {"before": os.getloadavg()[0]})
    await vllm_drafts.run(args, found, {}, lambda turn: kept.add(TIMES, *map(asdict, turn)))


@contextlib.asynccontextmanager
async def worker(args: argparse.Namespace, folder: Path) -> AsyncIterator[Server]:
    async with Fleet(folder) as fleet:
        yield await fleet.start("draft_worker", vllm_drafts.worker_command(args))


def prompts() -> dict[str, list[int]]:
    """Returns the token ids of TEXTS prompts and their second halves, by name."""
    texts = encode(built_in_prompts())
    halves = {f"{name}, second half": text[len(text) // 2 :] for name, text in texts.items()}
    every = {name: text[:LONGEST_PROMPT] for name, text in {**texts, **halves}.items()}
    return dict(itertools.islice(every.items(), TEXTS))


async def measure_identity(args: argparse.Namespace, kept: Kept, folder: Path) -> None:
    """Keeps the tokens of plain vLLM and of each form, one engine at a time."""
    for name in (PLAIN, *FORMS):
        have = {one["prompt"] for one in kept.of(IDENTITY) if one["engine"] == name}
        wanted = {prompt: ids for prompt, ids in prompts().items() if prompt not in have}
        if not wanted:
            continue
        async with worker(args, folder) as drafts, vllm_drafts.engine(args, name, drafts.address, folder) as peer:
            for prompt, ids in wanted.items():
                answer = await peer.answer(ids, TEXT_TOKENS)
                kept.add(IDENTITY, {"engine": name, "prompt": prompt, "token_ids": list(answer.token_ids)})
        print(f"{IDENTITY}: {name} is measured", file=sys.stderr)


async def measure_hung(args: argparse.Namespace, kept: Kept, folder: Path) -> None:
    """Keeps the drafter's seconds per step from the moment the worker was stopped."""
    for form in FORMS:
        have = sum(len(one["seconds"]) for one in kept.of(HUNG) if one["form"] == form)
        if have >= STEPS:
            continue
        file = folder / f"{form}.seconds"
        async with worker(args, folder) as drafts:
            more = {timed_drafter.VARIABLE: str(file)}
            drafter = "benchmarks.timed_drafter.TimedDrafter"
            async with vllm_drafts.engine(args, form, drafts.address, folder, more, drafter) as peer:
                await _steps_while_hung(peer, drafts, file, form, kept, STEPS - have)
        print(f"{HUNG}: {form} is measured", file=sys.stderr)


async def _steps_while_hung(peer: Peer, drafts: Server, file: Path, form: str, kept: Kept, steps: int) -> None:
    texts = itertools.cycle(prompts().values())
    await peer.answer(next(texts), HUNG_TOKENS)
    answered = len(file.read_text().split())
    drafts.process.send_signal(signal.SIGSTOP)
    try:
        seen = answered
        while seen < answered + steps:
            await peer.answer(next(texts), HUNG_TOKENS)
            seconds = [float(each) for each in file.read_text().split()]
            kept.add(HUNG, {"form": form, "seconds": seconds[seen:]})
            seen = len(seconds)
    finally:
        drafts.process.send_signal(signal.SIGCONT)


def bars(kept: Kept, budget_ms: float, margin_ms: float) -> list[Bar]:
    """Judges kept results; an incomplete part counts as not measured."""
    return [*time_bars(timed(kept)), *identity_bars(kept.of(IDENTITY)), *hung_bars(kept.of(HUNG), budget_ms, margin_ms)]


def time_bars(found: Sequence[Timed]) -> list[Bar]:
    """Judges medians over prompts of ratios of the time per token."""

    def ratio(rtt_ms: float, ours: str, theirs: str, kinds: Iterable[str] | None = None) -> float | None:
        of = {(one.engine, one.prompt): one.tpot_s for one in found if one.rtt_ms == rtt_ms}
        pairs = [
            seconds / of[theirs, prompt]
            for (engine, prompt), seconds in of.items()
            if engine == ours and (theirs, prompt) in of and (kinds is None or prompt.partition("/")[0] in kinds)
        ]
        return statistics.median(pairs) if pairs else None

    own, slow = ratio(0, WAITING, OWN), ratio(SLOW_MS, NEVER_WAITING, PLAIN)
    return [
        Bar("waiting at 0 ms / vLLM's own draft_model, time per token", own, 1.15, at_most=True),
        Bar(f"never waiting at {SLOW_MS:g} ms / plain vLLM, time per token", slow, 1.03, at_most=True),
        *(
            Bar(f"never waiting at {FAST_MS:g} ms / plain vLLM, {kind}", value, 1.0, at_most=True)
            for kind in REPETITIVE
            for value in [ratio(FAST_MS, NEVER_WAITING, PLAIN, (kind,))]
        ),
    ]


def identity_bars(found: Sequence[dict[str, Any]]) -> list[Bar]:
    texts = {(one["engine"], one["prompt"]): one["token_ids"] for one in found}
    names = [prompt for engine, prompt in texts if engine == PLAIN]

    def same(form: str) -> int | None:
        own = [prompt for prompt in names if (form, prompt) in texts]
        return sum(texts[form, p] == texts[PLAIN, p] for p in own) if len(own) == TEXTS else None

    return [Bar(f"{form}: greedy texts of plain vLLM, of {TEXTS}", same(form), TEXTS) for form in FORMS]


def hung_bars(found: Sequence[dict[str, Any]], budget_ms: float, margin_ms: float) -> list[Bar]:
    longest: dict[str, float | None] = {}
    for form in FORMS:
        seconds = [each for one in found if one["form"] == form for each in one["seconds"]]
        longest[form] = 1000 * max(seconds) if len(seconds) >= STEPS else None
    title = f"longest of {STEPS} steps with a hung worker, ms (the budget and {margin_ms:g})"
    return [Bar(f"{form}: {title}", value, budget_ms + margin_ms, at_most=True) for form, value in longest.items()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = vllm_drafts.parser_of("benchmarks.vllm_bars", "The bars on vLLM with drafts from elsewhere.")
    parser.set_defaults(output=Path("results/vllm_bars.jsonl"), rtt_ms=[FAST_MS, SLOW_MS])
    parser.flag("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.flag(
        "--margin-ms", type=float, default=5.0, metavar="MS", help="what a hung step may take beyond the budget"
    )
    return vllm_drafts.checked(parser, argv)


async def measure(args: argparse.Namespace, kept: Kept) -> None:
    """Measures the requested parts. Raises PeerFailed or ServerFailed."""
    eager = argparse.Namespace(**{**vars(args), "eager": True})  # which starts sooner; these parts take no times
    with tempfile.TemporaryDirectory(prefix="vllm-bars") as folder:
        if IDENTITY in args.parts:
            await measure_identity(eager, kept, Path(folder))
        if HUNG in args.parts:
            await measure_hung(eager, kept, Path(folder))
        if TIMES in args.parts:
            await measure_times(args, kept)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    settings = ("prompts_per_workload", "max_new_tokens", "draft_tokens", "budget_ms", "dtype", "eager", "rtt_ms")
    try:
        kept = Kept(args.output, {name: getattr(args, name) for name in settings})
    except ValueError as error:
        print(f"benchmarks.vllm_bars: error: {error}", file=sys.stderr)
        return 2
    began, failed = time.monotonic(), ""
    try:
        asyncio.run(measure(args, kept))
    except (PeerFailed, ServerFailed) as error:
        failed = str(error)
    print("\n".join(vllm_drafts.lines(timed(kept))))
    loads = [one["before"] for one in kept.of("load")]
    state = "idle" if all(load < BUSY_LOAD for load in loads) else "BUSY: bars on time are those of an idle machine"
    print(f"load before the times: {loads}; {state}" if loads else "no times were measured")
    for bar in bars(kept, args.budget_ms, args.margin_ms):
        value = "-" if bar.value is None else f"{bar.value:.3f}"
        print(f"{bar.verdict:12} {value:>8} {'<=' if bar.at_most else '>='} {bar.bound:<6g} {bar.title}")
    print(f"took {time.monotonic() - began:.0f} s", file=sys.stderr)
    if failed:
        print(f"benchmarks.vllm_bars: error: {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

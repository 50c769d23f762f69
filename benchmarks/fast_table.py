"""Writes the dated Markdown table of benchmarks/fast.py that README quotes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.bars import best_of, best_prompts, fastest
from benchmarks.fast_report import Outcome
from benchmarks.fast_settings import PROMPT_TOKENS
from benchmarks.figures import decoding, speedup
from benchmarks.formats import FORMATS, WITH_DRAFT, is_ours
from benchmarks.prompt_speed import speedup as prompt_speedup
from tandem.comparison.measuring.machine import this_machine


def quoted_table(outcome: Outcome) -> str:
    """Returns each build's best in every width, and how many times as fast ours is."""
    lines = [
        f"{this_machine().processor}, {outcome.threads} threads, {outcome.started_at}, `python -m benchmarks.fast`:"
        " medians, one request at a time. In brackets the fastest format, and how many times as fast Tandem is.",
        "",
        "| | " + " | ".join(f"{form.bits} ({form.weights})" for form in FORMATS) + " |",
        "|---|" + "---:|" * len(FORMATS),
        *(f"| {what} | {' | '.join(cells)} |" for what, cells in _rows(outcome)),
    ]
    mine = fastest(outcome.samples, [form.fused for form in FORMATS])
    for build in outcome.builds:
        theirs = best_of(outcome.samples, build)
        if mine and theirs and (ahead := speedup(outcome.samples, mine, theirs, decoding)):
            lines += ["", f"Tandem's {mine} is {ahead:.2f} times as fast as {build}'s fastest, {theirs}."]
    missing = [f"\n{remark.splitlines()[0]}." for remark in outcome.remarks if remark.startswith(("no ", "server "))]
    return "\n".join([*lines, *missing]) + "\n"


def _rows(outcome: Outcome) -> Iterator[tuple[str, list[str]]]:
    yield "Tandem, plain, ms a token", [_timed(outcome, [form.plain]) for form in FORMATS]
    yield "Tandem, fused", [_timed(outcome, [form.fused]) for form in FORMATS]
    for build in outcome.builds:
        yield f"{build}, plain", [_timed(outcome, form.of(build), form.plain) for form in FORMATS]
        yield f"{build} with our draft", [_timed(outcome, form.of(build, True), form.fused) for form in FORMATS]
    for n in PROMPT_TOKENS:
        yield f"Tandem, prompts of {n}, tokens/s", [_rate(outcome, [form.plain], n) for form in FORMATS]
        for build in outcome.builds:
            yield f"{build}, prompts of {n}", [_rate(outcome, form.of(build), n, form.plain) for form in FORMATS]


def _timed(outcome: Outcome, names: Sequence[str], mine: str = "") -> str:
    best = fastest(outcome.samples, names)
    if best is None:
        return "–"
    times = [ms for s in outcome.samples if s.contender == best and (ms := decoding(s)) is not None]
    ahead = speedup(outcome.samples, mine, best, decoding) if mine else None
    return _cell(f"{statistics.median(times):.2f}", best, ahead)


def _rate(outcome: Outcome, names: Sequence[str], tokens: int, mine: str = "") -> str:
    best = best_prompts(outcome.speeds, names, tokens)
    if best is None:
        return "–"
    ahead = prompt_speedup(outcome.speeds, mine, best.contender, tokens) if mine else None
    return _cell(f"{best.rate:.0f}", best.contender, ahead)


def _cell(figure: str, contender: str, ahead: float | None) -> str:
    if is_ours(contender):
        return figure
    times = "" if ahead is None else f", {ahead:.2f}×"
    return f"{figure} ({contender.removesuffix(WITH_DRAFT).split()[-1]}{times})"

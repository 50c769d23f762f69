"""Prints the figures of the load tools side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from benchmarks.load_tools import Shape
from benchmarks.openai_runs import Result
from benchmarks.openai_servers import ARCHITECTURES, VLLM

COLUMNS = (
    ("requests\n/min", "requests_per_minute", 1),
    ("tokens\n/s", "output_tokens_per_second", 1),
    ("TTFT\np50 ms", "ttft_p50_ms", 0),
    ("TTFT\np90 ms", "ttft_p90_ms", 0),
    ("ITL\np50 ms", "itl_p50_ms", 1),
    ("ITL\np90 ms", "itl_p90_ms", 1),
    ("latency\np50 ms", "latency_p50_ms", 0),
    ("input\ntokens", "input_tokens", 0),
    ("output\ntokens", "output_tokens", 0),
    ("accepted\ntokens", "accepted_tokens", 1),
    ("done", "completed", 0),
    ("errors", "errors", 0),
)


def tables(results: Sequence[Result], shapes: Mapping[str, Shape]) -> Iterator[Table]:
    """Builds a table for each shape and load: a row for each server and tool, so that they stand side by side."""
    for shape, load in dict.fromkeys((result.shape, result.load) for result in results):
        lengths = shapes[shape]
        shown = Table(
            title=f"{shape} ({lengths.mean_input_tokens} in, {lengths.mean_output_tokens} out), {load}",
            title_justify="left",
            box=box.SIMPLE,
            padding=0,
        )
        shown.add_column("server")
        shown.add_column("tool")
        for heading, _, _ in COLUMNS:
            shown.add_column(heading, justify="right")
        of = [result for result in results if (result.shape, result.load) == (shape, load)]
        for server in dict.fromkeys((*ARCHITECTURES, VLLM)):
            for result in (result for result in of if result.server == server):
                shown.add_row(server, result.tool, *_cells(result))
        yield shown


def _cells(result: Result) -> list[str]:
    if result.figures is None:
        return ["failed", *[""] * (len(COLUMNS) - 1)]
    return [_number(getattr(result.figures, name), digits) for _, name, digits in COLUMNS]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

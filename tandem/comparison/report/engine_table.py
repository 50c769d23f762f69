"""Builds the table of a comparison whose targets are vLLM's servers: its counters, beside what came to the client."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.report import formatting as fmt
from tandem.comparison.report import reading
from tandem.comparison.report.blocks import Cell, Column, Table, table, words
from tandem.comparison.report.reading import JSON
from tandem.comparison.vllm.settings import SERVED, VLLM

NOTE = (
    "Steps, draft tokens and accepted tokens are vLLM's own counts (its /metrics, read before and after each request);"
    " chunks and the tokens that came beyond one a chunk are the client's. The last step may accept more than is asked"
    " for, and chunks that wait for each other come as one. First difference: the earliest position at which a text"
    " leaves vLLM's own plain one."
)
HEADS = (
    Column("of vLLM", brief="of vLLM"),
    Column("steps", brief="steps"),
    Column("draft tokens", brief="draft\ntokens"),
    Column("accepted tokens", brief="acc-\nepted"),
    Column("chunks at the client", brief="chunks,\nclient"),
    Column("tokens beyond one a chunk", brief="beyond,\nclient"),
    Column("texts of plain vLLM", brief="same\ntext"),
    Column("first difference", brief="first\ndiff."),
)


def engine_table(comparison: JSON) -> Table | None:
    """Returns the table of all conditions without a load; None if the targets are not vLLM's."""
    if comparison["settings"].get("engine") != VLLM:
        return None
    conditions = [condition for condition in comparison["conditions"] if condition["varies"] != "load"]
    rows = [
        [
            fmt.name(name),
            _where(condition),
            _of_vllm(comparison, name),
            *_cells(name, of, _records(comparison, condition["name"], name)),
        ]
        for condition in conditions
        for name, of in condition["architectures"].items()
        if name in SERVED
    ]
    version = ", ".join(reading.model_values(comparison, "backend"))
    return table(
        f"What {version} counted, and what came to the client",
        [*words("architecture", "condition"), *HEADS],
        rows,
        NOTE,
        ("What vLLM counted", NOTE),
    )


def _of_vllm(comparison: JSON, name: str) -> str:
    """Says what of vLLM an architecture is; of a server that ran already, by the word of who named it."""
    here = comparison["servers"].get(name, {}).get("started_here", True)
    return SERVED[name] if here else f"{SERVED[name]}, as named by --connect"


def _where(condition: JSON) -> str:
    return fmt.rtt(condition["link"]) if condition["varies"] in ("base", "link") else str(condition["name"])


def _records(comparison: JSON, condition: str, architecture: str) -> list[JSON]:
    return [
        record
        for record in comparison["records"]
        if (record["condition"], record["architecture"]) == (condition, architecture) and not record["error"]
    ]


def _cells(name: str, of: JSON, records: Sequence[JSON]) -> list[Cell | str]:
    chunks = [count for record in records for count in record["chunk_tokens"]]
    counted = (of["rounds"], of["drafted"], of["accepted"]) if of["rounds"] else (None, None, None)
    shown = [fmt.number(value, 0) for value in (*counted, len(chunks), sum(chunks) - len(chunks))]
    same = of["identical_to_autoregressive"]
    if name == AUTOREGRESSIVE.name or not same:
        return [*shown, fmt.MISSING, fmt.MISSING]
    first = min((one["position"] for one in same["divergences"]), default=None)
    return [*shown, f"{same['count']}/{same['total']}", fmt.MISSING if first is None else str(first)]

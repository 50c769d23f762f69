"""Compares tokens with plain decoding's, with logit gaps where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.clients.openai_client import UNKNOWN
from tandem.comparison.measuring.records import Measurement, Record


@dataclass(frozen=True, slots=True)
class Divergence:
    prompt: str
    run: int
    position: int
    autoregressive_token: int | None  # None: this output had ended
    token: int | None
    logit_gap: float | None  # margin of the autoregressive token; 0: a tie, None: unknown


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    count: int
    total: int  # completed by both
    divergences: tuple[Divergence, ...]


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def identity(
    records: Sequence[Record], reference: Sequence[Record], traces: Mapping[str, Measurement] | None = None
) -> TokenIdentity:
    """Compares records with the reference's of the same prompt and run. `traces`: with margins, by prompt."""
    expected = {(r.prompt, r.run): r.measurement.output_token_ids for r in reference if r.measurement}
    total = 0
    divergences: list[Divergence] = []
    for record in records:
        plain = expected.get((record.prompt, record.run))
        if record.measurement is None or plain is None:
            continue
        tokens = record.measurement.output_token_ids
        if UNKNOWN in tokens or UNKNOWN in plain:
            continue
        total += 1
        at = first_difference(plain, tokens)
        if at is not None:
            gap = _gap((traces or {}).get(record.prompt), plain, at)
            theirs, own = (next(iter(ids[at:]), None) for ids in (plain, tokens))
            divergences.append(Divergence(record.prompt, record.run, at, theirs, own, gap))
    return TokenIdentity(total - len(divergences), total, tuple(divergences))


def diverged_prompts(records: Sequence[Record], reference: Sequence[Record]) -> set[str]:
    """Returns the prompts whose tokens differ from the reference's of the same run."""
    return {divergence.prompt for divergence in identity(records, reference).divergences}


def _gap(trace: Measurement | None, plain: tuple[int, ...], position: int) -> float | None:
    # A trace that differs from the timed output before this position has another context.
    end = position + 1
    same = trace is not None and position < len(plain) and trace.output_token_ids[:end] == plain[:end]
    return trace.margins[position] if trace and same and len(trace.margins) >= end else None

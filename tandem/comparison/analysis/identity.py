"""Whether an architecture's tokens are those of plain decoding, and how close the call was where they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.comparison.measuring.records import Record


@dataclass(frozen=True, slots=True)
class MarginTrace:
    """A request repeated on the autoregressive server: its tokens, and each one's margin in logits."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first output position at which two token sequences part; a token is None where one of them had ended.

    logit_gap: the margin of the autoregressive token there, 0 being a tie; None where it could not be had.
    """

    prompt: str
    run: int
    position: int
    autoregressive_token: int | None
    token: int | None
    logit_gap: float | None


@dataclass(frozen=True, slots=True)
class Identity:
    """`count` of the `total` requests that both completed have the same tokens."""

    count: int
    total: int
    divergences: tuple[Divergence, ...]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def identity(
    records: Sequence[Record], reference: Sequence[Record], traces: Mapping[str, MarginTrace] | None = None
) -> Identity:
    """Compares with the reference's records of the same prompt and run. `traces` are by prompt name."""
    expected = {(r.prompt, r.run): r.measurement.output_token_ids for r in reference if r.measurement}
    total = 0
    divergences: list[Divergence] = []
    for record in records:
        plain = expected.get((record.prompt, record.run))
        if record.measurement is None or plain is None:
            continue
        total += 1
        tokens = record.measurement.output_token_ids
        position = first_difference(plain, tokens)
        if position is None:
            continue
        gap = _gap((traces or {}).get(record.prompt), plain, position)
        divergences.append(
            Divergence(record.prompt, record.run, position, _at(plain, position), _at(tokens, position), gap)
        )
    return Identity(total - len(divergences), total, tuple(divergences))


def parted(records: Sequence[Record], reference: Sequence[Record]) -> set[str]:
    """The prompts on which any of `records` has other tokens than the reference's record of the same run."""
    return {divergence.prompt for divergence in identity(records, reference).divergences}


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _gap(trace: MarginTrace | None, plain: tuple[int, ...], position: int) -> float | None:
    # A trace that left the timed output before this position measured another context.
    end = position + 1
    if trace is None or position >= len(plain) or trace.token_ids[:end] != plain[:end] or len(trace.margins) < end:
        return None
    return trace.margins[position]

"""Builds rows of steps from the options that a test is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem.runners.protocol import FusedRow, PrefillRow, ProposeRow, VerifyRow
from tandem.speculation.processing import Processor
from tandem.speculation.types import Request, Rule, SamplingParams, SparseDistribution


def verify_row(
    slot: int,
    position: int,
    last_token: int,
    draft: Sequence[int],
    sampling: SamplingParams,
    margins: bool = False,
    rule: Rule = Rule.AGREEMENT,
    distributions: tuple[SparseDistribution, ...] = (),
    processor: Processor | None = None,
    adapter: int = 0,
    **asked: Any,
) -> VerifyRow:
    """`asked`: further fields of the request."""
    request = Request(sampling, rule, margins, **asked)
    return VerifyRow(slot, position, last_token, tuple(draft), request, distributions, processor, adapter)


def propose_row(
    slot: int,
    position: int,
    tail: Sequence[int],
    k: int,
    sampling: SamplingParams,
    rule: Rule = Rule.AGREEMENT,
    target_vocab_size: int | None = None,
    processor: Processor | None = None,
    adapter: int = 0,
) -> ProposeRow:
    request = Request(sampling, rule)
    return ProposeRow(slot, position, tuple(tail), k, request, target_vocab_size, processor, adapter)


def fused_row(
    propose: ProposeRow,
    margins: bool = False,
    copied: tuple[int, ...] = (),
    logprobs: int | None = None,
    adapter: int = 0,
) -> FusedRow:
    request = replace(propose.request, margins=margins, logprobs=logprobs)
    return FusedRow(replace(propose, request=request), copied, adapter)


def changed(row: Any, **changes: Any) -> Any:
    """Returns the row with other fields, `sampling` and `rule` of its request among them."""
    asked = {name: changes.pop(name) for name in ("sampling", "rule") if name in changes}
    return replace(row, request=replace(row.request, **asked), **changes)


def fill(runner: Any, slot: int, tokens: Sequence[int], start: int = 0, adapter: int = 0, chunk: int = 0) -> None:
    """Prefills a slot in chunks from `start` on."""
    size = chunk or runner.limits.chunk
    for at in range(start, len(tokens), size):
        assert runner.prefill([PrefillRow(slot, at, tuple(tokens[at : at + size]), adapter)]) == [None]

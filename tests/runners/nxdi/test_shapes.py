"""Buckets: which are used, and what is said about their bits."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.runners.load_runner import Shape
from tandem.runners.protocol import PrefillRow
from tests.rows import verify_row
from tests.runners.nxdi.runners import Bench, bench  # noqa: F401
from tests.support import GREEDY, oracle

SHAPE = Shape(slots=2, max_length=96, max_draft=3)
BUCKETS = {"context_encoding_buckets": [16, 32, 96], "token_generation_buckets": [32, 64, 96]}


def test_without_buckets_there_is_one_shape_and_its_bits_are_checked(bench: Bench) -> None:  # noqa: F811
    shapes = bench.target(SHAPE).shapes
    assert (shapes.widths, shapes.batches, shapes.lengths, shapes.chunks) == ((4,), (2,), (), (96,))
    assert shapes.bit_exact and not shapes.note


def test_buckets_that_give_the_same_bits_are_used(bench: Bench) -> None:  # noqa: F811
    runner = bench.target(SHAPE, neuron_config=BUCKETS)
    assert runner.shapes.bit_exact
    assert (runner.shapes.lengths, runner.shapes.chunks) == ((31, 63), (15, 31, 96))


@pytest.mark.parametrize("fast", [False, True])
def test_buckets_that_differ_are_not_used_unless_asked_for(bench: Bench, monkeypatch, fast: bool) -> None:  # noqa: F811
    real = application_class()._row

    def differing(self, which, line, ids, mask, positions, toy) -> Any:  # type: ignore[no-untyped-def]
        said = real(self, which, line, ids, mask, positions, toy)
        return [each + (len(mask) < 40) * 1e-6 for each in said]

    monkeypatch.setattr(application_class(), "_row", differing)
    shapes = bench.target(SHAPE, fast=fast, neuron_config=BUCKETS).shapes
    assert shapes.lengths == ((31, 63) if fast else (63,))
    assert shapes.bit_exact is not fast


def test_a_cache_written_by_context_encoding_that_differs_is_said_to(bench: Bench, monkeypatch) -> None:  # noqa: F811
    """The device's prefill leaves other bits behind: logits then depend on how a prefix was written."""
    real = application_class()._row

    def differing(self, which, line, ids, mask, positions, toy) -> Any:  # type: ignore[no-untyped-def]
        written = getattr(self, "written", {})
        prefilled = sum(1 for s, shown in enumerate(mask) if shown and (line, s) not in written)
        self.written = written | {(line, p): True for p in positions}
        return [each + prefilled * 1e-6 for each in real(self, which, line, ids, mask, positions, toy)]

    monkeypatch.setattr(application_class(), "_row", differing)
    assert not bench.target(SHAPE).shapes.bit_exact


def test_every_length_up_to_the_last_position_finds_a_bucket(bench: Bench) -> None:  # noqa: F811
    tokens = tuple(i % 200 + 1 for i in range(SHAPE.max_length))
    for fast, runner in ((False, bench.target(SHAPE, neuron_config=BUCKETS)), (True, bench.target(SHAPE, True))):
        for length in range(2, SHAPE.max_length):
            runner.prefill([PrefillRow(0, 0, tokens[: length - 1])])
            (verdict,) = runner.verify([verify_row(0, length - 1, tokens[length - 1], (), GREEDY)])
            assert verdict.token_ids == oracle(tokens[:length], GREEDY, 1, past_the_end=True), (fast, length)


def application_class() -> Any:
    from tests.runners.nxdi.simulated import Application

    return Application

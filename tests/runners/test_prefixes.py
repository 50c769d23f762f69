"""Pages of keys and values, copied out of one slot and into another: the logits behind them have the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tandem.engine.compatibility import able
from tandem.runners.capabilities import PAGE, Pages
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.weights import packing
from tandem.speculation.types import SamplingParams
from tests.daily import daily
from tests.rows import fill, propose_row, verify_row
from tests.runners.compiled import eager
from tests.runners.test_native import GREEDY, module_of, native, sequence
from tests.runners.test_quantised import WIDE

SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=7)
SPECULATING = 3


def checked(*arguments: Any, **settings: Any) -> NativeRunner:
    """A native runner whose bits were checked, as at the start of a server."""
    runner = native(*arguments, **settings)
    runner.warm_up()
    return runner


RUNNERS: dict[str, Callable[[], Any]] = {
    "native, float32": lambda: checked(module_of(dtype=torch.float32)),
    "native, bfloat16": lambda: checked(module_of(dtype=torch.bfloat16)),
    "native, heads 48 wide": lambda: checked(module_of("heads 48 wide, as stories15M has")),
    "native, qwen3": lambda: checked(module_of("qwen3", dtype=torch.bfloat16)),
    "native, int8": lambda: checked(module_of(**WIDE), packing=packing("int8")),
    "native, q4": lambda: checked(module_of(dtype=torch.bfloat16, **WIDE), packing=packing("q4")),
    "torch, float32": eager,
    "torch, bfloat16": partial(eager, dtype=torch.bfloat16),
}


def bits(runner: Any, slot: int, tokens: list[int]) -> bytes:
    """The logits behind the last token and two drafts, as they are."""
    row = verify_row(slot, len(tokens) - 3, tokens[-3], tuple(tokens[-2:]), GREEDY)
    logits = torch.as_tensor(runner.verify_logits([row])[0])[:3].contiguous()
    return logits.view(torch.uint8).numpy().tobytes()


def decode(runner: Any, slot: int, tokens: list[int]) -> None:
    """Processes the tokens in verification steps of all widths."""
    fill(runner, slot, tokens[:3])
    at, chance = 3, random.Random(5)
    while at < len(tokens):
        width = min(chance.randint(1, SPECULATING + 1), len(tokens) - at)
        runner.verify_logits([verify_row(slot, at, tokens[at], tuple(tokens[at + 1 : at + width]), GREEDY)])
        at += width


def check_pages(runner: Any) -> None:
    """Prefilled and decoded pages, copied to a slot that held something else, give the bits of a cold prompt."""
    pages = able(runner).pages
    assert isinstance(pages, Pages) and pages.bytes
    store, tokens = runner.page_store(9), [each % runner.limits.vocab_size for each in sequence(75)]
    fill(runner, 0, tokens[:-3])
    cold = bits(runner, 0, tokens)
    whole = (len(tokens) - 3) // PAGE
    for process in (fill, decode):
        process(runner, 1, tokens[:-3])
        pages = [8, 2, 5, 0, 7][:whole]
        store.save(1, 0, pages)
        for kept in range(1, whole + 1):
            fill(runner, 1, [(each + 1) % runner.limits.vocab_size for each in tokens])
            store.load(1, 0, pages[:kept])
            fill(runner, 1, tokens[:-3], kept * PAGE)
            assert bits(runner, 1, tokens) == cold, f"{process.__name__}, {kept} pages"
    store.load(1, 2, pages[2:])
    assert bits(runner, 1, tokens) == cold, "pages from the middle on"


@pytest.mark.parametrize("name", daily(RUNNERS, 1, 3, 4, 6))
def test_the_bits_behind_copied_pages_are_those_of_a_cold_prompt(name: str) -> None:
    check_pages(RUNNERS[name]())


@pytest.mark.parametrize("only", [None, tuple(range(0, 211, 3))], ids=["whole head", "frequent tokens"])
def test_a_native_draft_proposes_the_same_after_copied_pages(only: tuple[int, ...] | None) -> None:
    draft, tokens = native(module_of(dtype=torch.bfloat16), only, verifies=False), sequence(60)
    store = draft.page_store(3)

    def proposed(slot: int) -> tuple[int, ...]:
        (made,) = draft.propose([propose_row(slot, 59, tuple(tokens[-2:]), 4, SAMPLED)])
        return made.token_ids  # type: ignore[union-attr]

    fill(draft, 0, tokens[:-2])
    store.save(0, 0, [2, 0, 1])
    store.load(2, 0, [2, 0, 1])
    fill(draft, 2, tokens[:-2], 3 * PAGE)
    assert proposed(2) == proposed(0)


def test_runners_whose_bits_nobody_checked_or_that_run_graphs_copy_nothing() -> None:
    unchecked = native(module_of())
    assert not unchecked.shapes.bit_exact
    for runner in (eager(draft=True), unchecked):
        assert "the same bits" in able(runner).pages  # type: ignore[operator]

"""Pages that another model's slots hold, over a wire into slots here: the logits behind them have the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.clients.prefill_client import LAYOUT_FIELDS, layout_from_wire, layout_to_wire, run_from_wire, run_to_wire
from tandem.engine.batcher import Batcher
from tandem.engine.prefill import PageCopies, PageRun, PrefillFailed
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.runners.capabilities import PAGE
from tandem.runners.native.native_runner import page_format
from tandem.runners.protocol import Runner
from tandem.speculation.types import Request
from tests.daily import daily
from tests.rows import fill
from tests.runners.compiled import eager
from tests.runners.test_native import module_of, sequence
from tests.runners.test_prefixes import RUNNERS, bits, checked
from tests.services.prefill_sites import prefill_site
from tests.support import run


def another(name: str) -> Any:
    """A runner with the weights of RUNNERS[name] and slots of its own; those of module code are shared among tests."""
    if not name.startswith("torch"):
        return RUNNERS[name]()
    return eager.__wrapped__(dtype=torch.bfloat16 if name.endswith("bfloat16") else torch.float32)


async def copies_of(runner: Runner) -> PageCopies:
    batcher = Batcher("test")
    try:
        return await PageCopies.of(runner, batcher)
    finally:
        await batcher.close()


def check_handed_over(sender: Any, receiver: Any) -> None:
    """Pages of a sender's slot, as bytes in the receiver's, give the bits of a prompt that the receiver processes."""
    out, into = run(copies_of(sender)), run(copies_of(receiver))
    assert out.layout == into.layout
    tokens = [each % receiver.limits.vocab_size for each in sequence(75)]
    fill(receiver, 0, tokens[:-3])
    cold = bits(receiver, 0, tokens)
    fill(sender, 1, tokens[:-3])
    whole = (len(tokens) - 3) // PAGE
    fill(receiver, 1, [(each + 1) % receiver.limits.vocab_size for each in tokens])
    for first in range(0, whole, 3):
        (sent,) = out.out([PageRun(first, (), 1, min(3, whole - first))])
        came = run_from_wire(run_to_wire(sent), first, out.layout.page_bytes, whole)
        into.into([replace(came, slot=1)])
    fill(receiver, 1, tokens[:-3], whole * PAGE)
    assert bits(receiver, 1, tokens) == cold


@pytest.mark.parametrize("name", daily(RUNNERS, 0, 2, 5, 7))
def test_the_bits_behind_pages_of_another_model_are_those_of_a_cold_prompt(name: str) -> None:
    check_handed_over(another(name), RUNNERS[name]())


async def test_a_prompt_that_a_worker_knows_from_decoding_has_the_same_pages() -> None:
    """What it kept may come from steps of any width: the bits are the same, so it may hand them out."""
    pages = []
    for keeps in ("off", "all"):
        async with prefill_site(RUNNERS["native, bfloat16"]()) as worker:
            await share_prefixes([worker.engine], PrefixSharing(keeps, 8), lambda: None)
            for _ in range(2):
                found = [run async for run in worker.pages.of(sequence(64), 0, Request())]
                pages.append(tuple(page for run in found for page in run.pages))
    first, *others = pages
    assert len(first) == 4 and others == [first] * 3


def test_a_layout_names_what_the_bits_depend_on_and_any_difference_counts() -> None:
    native, module = (run(copies_of(RUNNERS[name]())).layout for name in ("native, float32", "torch, float32"))
    assert native.format.startswith("native ") and "avx" not in native.format, "in float32, every CPU has the same bits"
    assert f"torch {torch.__version__}" in module.format and "2 slots of 112" in module.format
    for name in LAYOUT_FIELDS:
        value = getattr(native, name)
        other = replace(native, **{name: value + 1 if isinstance(value, int) else "other"})
        said = native.difference(other)
        assert said and said.startswith(f"{name}: ") and native.difference(native) is None
        assert layout_from_wire(layout_to_wire(other)) == other


def test_where_bits_differ_between_cpus_the_layout_names_the_instructions() -> None:
    runner = checked(module_of(dtype=torch.bfloat16))
    assert page_format(runner.model).endswith(runner.model.library.tandem_instructions().decode())


def test_another_rotary_embedding_is_another_layout() -> None:
    formats = {page_format(checked(module_of(rope_theta=theta)).model) for theta in (1e4, 1e4, 2e4)}
    assert len(formats) == 2


@pytest.mark.parametrize("wrong", ["flipped", "short", "late", "many", "none"])
def test_a_message_that_is_not_what_its_sender_meant_is_refused(wrong: str) -> None:
    runner = checked(module_of())
    fill(runner, 0, sequence(40))
    out = run(copies_of(runner))
    (sent,) = out.out([PageRun(0, count=2)])
    message, size = run_to_wire(sent), out.layout.page_bytes
    assert run_from_wire(message, 0, size, 2) == sent
    if wrong == "flipped":
        message.data = message.data[:-1] + bytes([message.data[-1] ^ 64])
    if wrong == "short":
        message.data = message.data[:-1]
    if wrong == "none":
        message.data, message.checksums[:] = b"", []
    with pytest.raises(PrefillFailed):
        run_from_wire(message, 1 if wrong == "late" else 0, size, 1 if wrong == "many" else 2)

"""Toy adapters: an oracle for which rows have which adapter, and for caches that were filled with another."""

from __future__ import annotations

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.runners.protocol import PrefillRow
from tandem.speculation.types import Verdict
from tests.rows import verify_row
from tests.support import GREEDY, toy
from tests.toy import BACKEND, ToyConfig, ToyRunner, adapted, toy_logits

PROMPT = (5, 6, 7, 8)


def runner_with_adapters() -> ToyRunner:
    runner = toy()
    for number, name in enumerate(("red", "blue"), 1):
        runner.put_adapter(number, BACKEND.adapter(AdapterChoice(name, name)))
    return runner


def said(runner: ToyRunner, slot: int, adapter: int) -> tuple[int, ...]:
    (verdict,) = runner.verify([verify_row(slot, 3, PROMPT[-1], (), GREEDY, adapter=adapter)])
    assert isinstance(verdict, Verdict)
    return verdict.token_ids


def test_a_row_says_what_its_adapters_revision_makes_of_its_tokens() -> None:
    runner = runner_with_adapters()
    for slot, revision in enumerate(("", "toy:red", "toy:blue")):
        runner.prefill([PrefillRow(slot, 0, PROMPT[:-1], slot)])
        tokens = adapted(PROMPT, revision) if revision else PROMPT
        assert said(runner, slot, slot) == (int(toy_logits(tokens, ToyConfig()).argmax()),)
    assert len({said(runner, slot, slot) for slot in range(3)}) == 3


def test_keys_and_values_of_another_adapter_show() -> None:
    runner = runner_with_adapters()
    runner.prefill([PrefillRow(0, 0, PROMPT[:-1], 1)])
    right = said(runner, 0, 1)
    for adapter in (0, 2):
        runner.prefill([PrefillRow(0, 0, PROMPT[:-1], adapter)])
        assert said(runner, 0, 1) != right

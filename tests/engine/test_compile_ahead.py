"""--role compile makes every graph that a server needs, into a folder where that server finds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tandem.cli import main
from tests.runners.compiled import FAMILIES, on_graphs

SHAPE = ["--batch", "1", "--sequence_length", "64", "--max_speculation_length", "2", "--prefill_chunk", "16"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(FAMILIES["llama"]()[1]).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def compile_ahead(folder: Path, *arguments: str, draft: bool = True) -> int:
    models = ["--target_model", str(folder / "model"), *(["--draft_model", str(folder / "model")] if draft else [])]
    where = ["--device", "cuda", "--dtype", "float32", "--threads", "1", "--compiled_dir", str(folder / "shared")]
    return main.main(["--role", "compile", *models, *where, *SHAPE, *arguments])


def test_it_says_what_it_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_graphs(monkeypatch)
    assert compile_ahead(folder, "--batch", "4", "--batch_buckets", "2", "--draft_buckets", "1") == 0
    target, draft, fused, where = capsys.readouterr().out.splitlines()
    assert target == "target model: 3 compiled in 4.5 s; prefill-1x16, verify-2x3, verify-4x3"
    assert draft == "draft model: 5 compiled in 7.5 s; prefill-1x16, propose-2x1, propose-2x2, propose-4x1, propose-4x2"
    assert fused == "fused: 4 compiled in 6.0 s; fused-2x1, fused-2x2, fused-4x1, fused-4x2"
    assert where.startswith(f"{folder / 'shared'}: ready after ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile_for", "targets"], "compile_for: 'targets' is not one of target, draft, fused"),
        (["--compile_for", "draft"], "draft_model: name the draft model to compile"),
        (["--compile", "off"], "compile: off compiles no graphs; leave it out, or use inductor"),
        (["--compile", "neuron"], "compile: neuron is not for cuda: auto or inductor or off"),
        (["--device", "cpu"], "device: cpu has no graphs to compile; name the device of the servers"),
        (["--backend", "toy"], "device: --role compile with --backend toy does not take it; --backend torch does"),
        (["--batch_buckets", "1,x"], "batch_buckets: '1,x' is not a list of numbers, as in 1,4"),
    ],
)
def test_what_it_cannot_compile_is_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    on_graphs(monkeypatch)
    capsys.readouterr()
    assert compile_ahead(folder, *arguments, draft=False) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("main.py")]
    assert line.startswith(f"main.py: {message}")

"""--role compile makes every graph that a server needs, into a folder where that server finds them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from tandem.checkpoints.locate import find
from tandem.cli import main
from tandem.runners.loading import Execution, Shape, load_runner
from tandem.runners.startup import Startup
from tandem.runners.torch.graphs import Graph, PackageCompiler
from tests.runners.compiled import FAMILIES

SHAPE = ["--batch", "1", "--sequence_length", "64", "--max_speculation_length", "2", "--prefill_chunk", "16"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(FAMILIES["llama"]()[1]).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def compile_ahead(folder: Path, *arguments: str, draft: bool = True) -> int:
    models = ["--target_model", str(folder / "model"), *(["--draft_model", str(folder / "model")] if draft else [])]
    where = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--compiled_dir", str(folder / "shared")]
    return main.main(["--role", "compile", *models, *where, *SHAPE, *arguments])


def test_it_says_what_it_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def counted(self: PackageCompiler, name: str, step: nn.Module, arguments: Sequence[Any]) -> Graph:
        assert not self._sealed
        self.statistics.compiled += 1
        self.statistics.compile_seconds += 1.5
        return step.forward

    monkeypatch.setattr(PackageCompiler, "graph", counted)
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
        (["--compile", "neuron"], "compile: neuron is not for cpu: auto or native or inductor or off"),
        (["--backend", "toy"], "device: --role compile with --backend toy does not take it; --backend torch does"),
        (["--batch_buckets", "1,x"], "batch_buckets: '1,x' is not a list of numbers, as in 1,4"),
    ],
)
def test_what_it_cannot_compile_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    capsys.readouterr()
    assert compile_ahead(folder, *arguments, draft=False) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("main.py")]
    assert line.startswith(f"main.py: {message}")


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_server_finds_what_was_compiled_ahead(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_ahead(folder) == 0
    assert [line.split(";")[0].split(" in ")[0] for line in capsys.readouterr().out.splitlines()[:3]] == [
        "target model: 2 compiled",
        "draft model: 2 compiled",
        "fused: 1 compiled",
    ]
    assert len(list((folder / "shared").glob("*/*/graph.pt2"))) == 5 and not os.path.exists(
        folder / "cache" / "compiled"
    )
    startup = Startup()
    execution = Execution("cpu", "float32", 1, "inductor", compiled=str(folder / "shared"))
    shape = Shape(slots=1, max_length=64, max_draft=2, chunk=16)
    target, draft = (load_runner(find(str(folder / "model")), execution, shape, verifies) for verifies in (True, False))
    for runner in (target, draft):
        runner.warm_up(startup)
    target.fuse(draft, startup)  # type: ignore[attr-defined]
    assert ["from disk" in note and "compiled in" not in note for note in startup.notes] == [True] * 3
    assert float(next((folder / "shared").glob("*/fused-1x2/seconds")).read_text()) > 0

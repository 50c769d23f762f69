"""Graphs kept on disk: a second process compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tandem.checkpoints.locate import find
from tandem.checkpoints.trusted_cache import made_once
from tandem.runners.loading import Execution, Shape, load_runner
from tandem.runners.protocol import PrefillRow
from tandem.runners.startup import Startup
from tandem.runners.torch import graphs
from tandem.runners.torch.graphs import KEPT, PackageCompiler, package_folder
from tests.rows import verify_row
from tests.runners.compiled import FAMILIES, GREEDY, PROMPT
from tests.support import REPOSITORY

SHAPE = Shape(slots=1, max_length=64, max_draft=2)


def decode(folder: Path, compile: str) -> dict[str, Any]:
    """Tokens, and what warm-up noted; run in a process of its own as well."""
    startup = Startup()
    runner = load_runner(find(str(folder)), Execution("cpu", "float32", 2, compile), SHAPE, startup=startup)
    runner.warm_up(startup)
    runner.prefill([PrefillRow(0, 0, PROMPT[:-1])])
    tokens = list(PROMPT)
    while len(tokens) < 40:
        (verdict,) = runner.verify([verify_row(0, len(tokens) - 1, tokens[-1], (3, 4), GREEDY)])
        tokens += verdict.token_ids  # type: ignore[union-attr]
    return {"tokens": tokens[:40], "notes": startup.notes, "exact": runner.shapes.bit_exact}


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_second_process_compiles_nothing_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(3)
    model = tmp_path / "model"
    LlamaForCausalLM(FAMILIES["llama"]()[1]).save_pretrained(model)
    first = decode(model, "inductor")
    assert first["exact"] and "2 compiled in" in first["notes"][0]
    assert first["tokens"] == decode(model, "off")["tokens"]
    code = (
        "import json, sys, pathlib; from tests.runners.test_artifacts import decode; "
        "print(json.dumps(decode(pathlib.Path(sys.argv[1]), 'inductor')))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(model)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    second = json.loads(ran.stdout.splitlines()[-1])
    assert "2 from disk in" in second["notes"][0] and "compiled in" not in second["notes"][0]
    assert second["tokens"] == first["tokens"]


def test_a_package_that_its_reader_refuses_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile(step: Any, arguments: Any, folder: Path) -> float:
        (folder / "graph.pt2").write_text(contents.pop())
        (folder / "seconds").write_text("1.0")
        return 1.0

    def load(folder: Path) -> Any:
        if (text := (folder / "graph.pt2").read_text()) == "of other software":
            raise RuntimeError("no such operator")
        return text

    contents = ["again", "of other software"]
    monkeypatch.setattr(graphs, "_compile", compile)
    made_once(tmp_path, "verify", "compiling", lambda folder: compile(None, None, folder) and None)
    monkeypatch.setattr(graphs, "_loaded", load)
    for _ in range(2):
        packages = PackageCompiler(tmp_path)
        assert packages.graph("verify", torch.nn.Identity(), ()) == "again"
    assert not contents and "unusable and is compiled again: no such operator" in caplog.text
    assert (packages.statistics.compiled, packages.statistics.loaded) == (0, 1)


def test_graphs_of_other_facts_lie_elsewhere_and_the_oldest_make_room(tmp_path: Path) -> None:
    folders = [package_folder(tmp_path, "m", {"weights": number}) for number in range(KEPT + 2)]
    assert len(set(folders)) == KEPT + 2 and package_folder(tmp_path, "m", {"weights": 0}) == folders[0]
    for age, folder in enumerate(reversed(folders)):
        folder.mkdir(parents=True)
        (folder / "x").touch()
        os.utime(folder, (1000 - age, 1000 - age))
    package_folder(tmp_path, "m", {"weights": KEPT + 1}, keeps=True)
    assert all(folder.is_dir() for folder in folders), "a shared folder is nobody's to clear"
    package_folder(tmp_path, "m", {"weights": KEPT + 1})
    assert [folder.is_dir() for folder in folders] == [False, False, *[True] * KEPT]

"""Compiled folders: found again, and only by what they were made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.runners.loading import Shape
from tandem_nxdi import load
from tandem_nxdi.artifacts import MANIFEST, compiled, ensure
from tests.runners.nxdi import simulated
from tests.runners.nxdi.runners import Bench, bench  # noqa: F401


def folders(bench: Bench) -> list[Path]:  # noqa: F811
    return sorted(path for path in (bench.folder / "compiled").iterdir() if path.is_dir())


def test_the_same_configuration_compiles_once(bench: Bench) -> None:  # noqa: F811
    bench.target()
    bench.target()
    assert len(simulated.COMPILED) == 1 and len(simulated.LOADED) == 2
    (folder,) = folders(bench)
    noted = json.loads((folder / MANIFEST).read_text())
    assert noted["target"]["name"] == "model0" and noted["neuron_config"]["speculation_length"] == 5
    assert set(noted["sdk"]) >= {"neuronx-distributed-inference", "neuronx-cc", "torch"}
    assert "window" in noted["what"]


def test_other_fields_weights_versions_or_roles_compile_anew(bench: Bench, monkeypatch) -> None:  # noqa: F811
    bench.target()
    bench.target(neuron_config={"fused_qkv": True})
    bench.target(Shape(2, 64, 4))
    bench.draft(0.0)
    bench.pair(0.0)
    (bench.model() / "model.safetensors").write_text("other weights")
    bench.target()
    monkeypatch.setattr(load, "versions", lambda: {"neuronx-cc": "another"})
    bench.target()
    assert len(simulated.COMPILED) == len(folders(bench)) == 7


def test_an_interrupted_compilation_is_not_mistaken_for_a_model(tmp_path: Path) -> None:
    wanted = compiled(str(tmp_path), "m", {"a": 1})

    def fails(folder: Path) -> None:
        (folder / "model.pt").write_text("half")
        raise RuntimeError("compiler exit 70")

    with pytest.raises(RuntimeError, match="exit 70"):
        ensure(wanted, fails)
    assert not wanted.ready and [p.name for p in tmp_path.iterdir() if p.is_dir()] == []

    def works(folder: Path) -> None:
        for name in ("model.pt", "neuron_config.json"):
            (folder / name).write_text("")

    assert ensure(wanted, works) and wanted.ready and not ensure(wanted, fails)
    (wanted.folder / MANIFEST).write_text("{}")
    assert not wanted.ready


def test_two_compilations_never_share_a_scratch_folder(bench: Bench, monkeypatch) -> None:  # noqa: F811
    import os

    seen = []
    monkeypatch.delenv("BASE_COMPILE_WORK_DIR", raising=False)
    compile_ = simulated.Application.compile

    def noting(self: simulated.Application, path: str) -> None:
        seen.append(os.environ["BASE_COMPILE_WORK_DIR"])
        compile_(self, path)

    monkeypatch.setattr(simulated.Application, "compile", noting)
    bench.target()
    assert str(os.getpid()) in seen[0] and "BASE_COMPILE_WORK_DIR" not in os.environ
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", "/elsewhere/")
    bench.draft()
    assert seen[1] == "/elsewhere/"

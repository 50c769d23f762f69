"""A library that is compiled ahead is used by CPUs that have its instructions, if it is of these sources."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.checkpoints.locate import EMBEDDED_DRAFT, find
from tandem.runners import load_runner
from tandem.runners.native import LibraryMissing, compilation, load_native
from tandem.runners.native.compilation import LEVELS, PACKAGE, file_name, prebuilt_library

SOURCES = "0123456789abcdef" * 4
BF16, VNNI, AVX2 = LEVELS


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, sources: str = SOURCES) -> None:
    spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == PACKAGE else None)
    for level in LEVELS:
        (folder / file_name(level, sources)).write_bytes(b"library")


def test_a_cpu_gets_the_best_level_whose_instructions_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prebuilt_library(SOURCES, " ".join(BF16.needs)) is None  # nothing is installed
    installed(monkeypatch, tmp_path)
    for level in LEVELS:
        found = prebuilt_library(SOURCES, f"flags : sse {' '.join(level.needs)} more")
        assert found == tmp_path / file_name(level, SOURCES)
    assert prebuilt_library(SOURCES, " ".join(VNNI.needs - {"avx512vl"})) == tmp_path / file_name(AVX2, SOURCES)
    assert prebuilt_library(SOURCES, "flags : sse sse2") is None
    assert prebuilt_library("f" * 64, " ".join(BF16.needs)) is None  # of other sources


def test_a_library_of_these_sources_spares_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "cpu_features", lambda: " ".join(AVX2.needs))
    monkeypatch.setattr(compilation, "find_compiler", lambda: pytest.fail("asked for a compiler"))
    installed(monkeypatch, tmp_path, compilation.sources_hash())
    assert compilation.library_path() == tmp_path / file_name(AVX2, compilation.sources_hash())


def test_without_library_and_compiler_the_refusal_says_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        compilation.LibraryMissing, match=r"^no C\+\+ compiler: install g\+\+ or clang\+\+, or set CXX$"
    ):
        compilation.find_compiler()
    monkeypatch.setattr(compilation, "install_command", "pip install 'tandem-speculative[{}]'".format)
    with pytest.raises(
        compilation.LibraryMissing, match=r"compiled already: pip install 'tandem-speculative\[serve\]'$"
    ):
        compilation.find_compiler()


def test_a_model_that_lacks_the_library_alone_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*rest: object) -> None:
        raise LibraryMissing("no C++ compiler: install g++")

    module = SimpleNamespace(config=SimpleNamespace(vocab_size=256), parameters=list)
    monkeypatch.setattr(load_native, "load_checkpoint", missing)
    monkeypatch.setattr(load_runner, "_load_module", lambda *rest: module)
    monkeypatch.setattr(load_runner, "_runner", lambda *rest: None)
    with caplog.at_level(logging.INFO):
        load_runner.load_runner(find(str(EMBEDDED_DRAFT)), load_runner.Execution("cpu"), load_runner.Shape())
    assert ("WARNING", "no C++ compiler: install g++") in [
        (record.levelname, record.getMessage().partition("could: ")[2]) for record in caplog.records
    ]

"""Compiles CPU graphs ahead of time into AOTInductor packages: inductor's own caches refuse frozen weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tandem.checkpoints.trusted_cache import made_once
from tandem.runners.torch.graphs import CompileStatistics, Graph, GraphRefused

log = logging.getLogger("tandem.engine")
KEPT = 6  # folders kept on disk: a fused server needs three; each graph contains the weights once
_PACKAGE, _SECONDS = "graph.pt2", "seconds"
_SOURCES = (
    *("graph_modules.py", "sampled_modules.py", "model.py", "graph_model.py", "slot_cache.py", "kernels.py"),
    *("../eagle/graph_modules.py", "../eagle/graph_taps.py", "../eagle/module.py"),
)


class PackageCompiler:
    """Compiles graphs into `folder`, or loads them from it."""

    def __init__(self, folder: Path) -> None:
        self.statistics = CompileStatistics()
        self._folder = folder
        self._sealed = False

    def graph(self, name: str, step: nn.Module, arguments: Sequence[Any]) -> Graph:
        if self._sealed:
            raise GraphRefused(f"{name}: a graph was requested after warm-up")
        compiled = 0.0

        def make(partial: Path) -> None:
            nonlocal compiled
            compiled = _compile(step, tuple(arguments), partial)

        try:
            folder = made_once(self._folder, name, f"compiling {name}", make)
        except OSError as error:
            raise GraphRefused(f"{name}: cannot store graphs in {self._folder}: {error}") from None
        with contextlib.suppress(PermissionError):  # part of a container image
            os.utime(self._folder)
        if compiled:
            self.statistics.compiled += 1
            self.statistics.compile_seconds += compiled
            return _loaded(folder)
        began = time.perf_counter()
        try:
            graph = _loaded(folder)
        except Exception as error:  # a package of other software may raise anything
            log.warning("%s is unusable and is compiled again: %s", folder, str(error).splitlines()[0])
            shutil.rmtree(folder)
            return self.graph(name, step, arguments)
        self.statistics.loaded += 1
        self.statistics.load_seconds += time.perf_counter() - began
        self.statistics.before += float((folder / _SECONDS).read_text())
        return graph

    def seal(self) -> None:
        self._sealed = True


def _compile(step: nn.Module, arguments: tuple[Any, ...], folder: Path) -> float:
    began = time.perf_counter()
    with torch.no_grad():
        exported = torch.export.export(step, arguments, strict=False)
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(folder / _PACKAGE), inductor_configs={"freezing": True}
        )
    seconds = time.perf_counter() - began
    (folder / _SECONDS).write_text(str(seconds))
    return seconds


def _loaded(folder: Path) -> Graph:
    graph: Graph = torch._inductor.aoti_load_package(str(folder / _PACKAGE), run_single_threaded=True)
    return graph


def package_folder(root: Path, name: str, facts: Mapping[str, object], keeps: bool = False) -> Path:
    """The folder of graphs with these facts; deletes old ones unless `keeps`."""
    everything = {**facts, **_machine(), "source": _source()}
    digest = hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()[:32]
    folder = root / f"{name}-{digest}"
    if not keeps:
        _make_room(root, folder)
    return folder


def _make_room(root: Path, mine: Path) -> None:
    if not root.is_dir():
        return
    others = sorted((f for f in root.iterdir() if f.is_dir() and f != mine), key=lambda f: -f.stat().st_mtime)
    for old in others[KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def _machine() -> dict[str, object]:
    import transformers

    info = Path("/proc/cpuinfo")
    flags = (
        next((line for line in info.read_text().splitlines() if line.startswith("flags")), "") if info.exists() else ""
    )
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "flags": flags,
        "threads": torch.get_num_threads(),
    }


def _source() -> str:
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in _SOURCES)).hexdigest()

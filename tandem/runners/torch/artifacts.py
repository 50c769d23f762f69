"""Compiles graphs for the CPU ahead of time with inductor, and keeps them on disk.

Freezing packs the weights into the graph, in oneDNN's layout. Inductor's own caches refuse such constants, so
torch.compile would compile again at every start. A package (AOTInductor) holds them, loads in half a second without
tracing, and cannot recompile.
"""

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

from tandem.checkpoints.file_hashes import write_whole
from tandem.checkpoints.trusted_cache import locked, private_folder, seal, seal_error
from tandem.runners.torch.graphs import CompileStatistics, Graph, GraphRefused

log = logging.getLogger("tandem.engine")
KEPT = 6  # folders kept on disk: a fused server needs three; each graph contains the weights once
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
        try:
            folder = private_folder(self._folder)
        except OSError as error:
            raise GraphRefused(f"{name}: cannot store graphs in {self._folder}: {error}") from None
        path = folder / f"{name}.pt2"
        with contextlib.suppress(PermissionError):  # part of a container image
            os.utime(folder)
        with locked(folder / "lock"):
            return self.load(path) or self._compile(path, step, tuple(arguments))

    def seal(self) -> None:
        self._sealed = True

    def load(self, path: Path) -> Graph | None:
        """The graph in the file, or None if it must be compiled."""
        wrong = seal_error(path.with_suffix(".sealed"))
        if wrong is not None:
            if wrong:
                log.warning("compiling a graph again: %s", wrong)
            return None
        began = time.perf_counter()
        try:
            graph = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
            before = float(json.loads(path.with_suffix(".json").read_text())["compile_seconds"])
        except Exception as error:  # a damaged package may raise anything
            log.warning("%s is unusable and is compiled again: %s", path, str(error).splitlines()[0])
            return None
        self.statistics.loaded += 1
        self.statistics.load_seconds += time.perf_counter() - began
        self.statistics.before += before
        return graph

    def _compile(self, path: Path, step: nn.Module, arguments: tuple[Any, ...]) -> Graph:
        began = time.perf_counter()
        log.info("compiling %s once, into %s", path.stem, path.parent)
        partial = path.with_name(f"partial-{path.name}")
        with torch.no_grad():
            exported = torch.export.export(step, arguments, strict=False)
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(partial), inductor_configs={"freezing": True}
            )
        partial.replace(path)
        seconds = time.perf_counter() - began
        write_whole(path.with_suffix(".json"), json.dumps({"compile_seconds": seconds}))
        seal(path.with_suffix(".sealed"), [path, path.with_suffix(".json")])
        self.statistics.compiled += 1
        self.statistics.compile_seconds += seconds
        return torch._inductor.aoti_load_package(str(path), run_single_threaded=True)


def package_folder(root: Path, name: str, facts: Mapping[str, object], keeps: bool = False) -> Path:
    """The folder below `root` for graphs of these facts. Deletes old configurations unless `keeps`."""
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
    """Everything that compiled code depends on besides the model."""
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
    """Hash of the source that graphs are compiled from."""
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in _SOURCES)).hexdigest()

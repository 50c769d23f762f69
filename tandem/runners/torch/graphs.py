"""Compiles step modules into graphs, one per bucket, before a server is ready and never later.

On the CPU ahead of time, into AOTInductor packages on disk: inductor's own caches refuse frozen weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform as host
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from tandem.checkpoints.trusted_cache import made_once
from tandem.host.host import first_processor
from tandem.runners.protocol import Limits, RunnerIdentity
from tandem.runners.torch.platforms import Platform

log = logging.getLogger("tandem.engine")
Graph = Callable[..., Any]
Backend = Callable[..., Any]  # a dynamo backend: (traced module, example inputs) -> callable
BUCKETS_AT_MOST = 256  # graphs that dynamo may hold for the code of one step
KEPT = 6  # folders kept on disk: a fused server needs three; each graph contains the weights once
_PACKAGE, _SECONDS = "graph.pt2", "seconds"
_SOURCES = (
    *("graph_modules.py", "model.py", "graph_model.py", "slot_cache.py", "kernels.py"),
    *("../eagle/head_graphs.py", "../eagle/hidden_states.py", "../eagle/module.py"),
)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Rows per step, tokens per row of a verification and of a prefill step, draft tokens (ascending)."""

    batches: tuple[int, ...]
    width: int
    chunk: int
    drafts: tuple[int, ...]

    def batch(self, rows: int) -> int:
        return next(b for b in self.batches if b >= rows)

    def draft(self, k: int) -> int:
        return next(d for d in self.drafts if d >= k)


def buckets_for(
    platform: Platform, limits: Limits, batch_buckets: tuple[int, ...] = (), draft_buckets: tuple[int, ...] = ()
) -> Buckets:
    """A platform's buckets, with the user's batches and drafts if given. Raises ValueError above the limits."""
    slots, most = limits.slots, limits.max_draft
    batches, drafts = {1}, set[int]()
    if platform.every_bucket:
        batches, drafts = {2**i for i in range(10) if 2**i < slots}, set(range(1, most))
    if batch_buckets:
        batches = _within("batch_buckets", batch_buckets, "batch", slots)
    if draft_buckets:
        drafts = _within("draft_buckets", draft_buckets, "max_speculation_length", most)
    return Buckets(
        tuple(sorted(batches | {slots})), max(2, most + 1), limits.chunk, tuple(sorted(drafts | {most})) if most else ()
    )


def _within(name: str, values: tuple[int, ...], limit: str, most: int) -> set[int]:
    for value in values:
        if not 1 <= value <= most:
            raise ValueError(f"{name}: {value} is outside 1 to {most}, the {limit}")
    return set(values)


class GraphRefused(RuntimeError):
    """A step's shape is not one of the compiled buckets."""


@dataclass(slots=True)
class CompileStatistics:
    """Counts and seconds; `before`: seconds that compiling the loaded graphs once took."""

    compiled: int = 0
    loaded: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    before: float = 0.0

    def line(self) -> str:
        parts = []
        if self.compiled:
            parts.append(f"{self.compiled} compiled in {self.compile_seconds:.1f} s")
        if self.loaded:
            parts.append(f"{self.loaded} from disk in {self.load_seconds:.1f} s (compiling took {self.before:.1f} s)")
        return ", ".join(parts) or "none"


class GraphCompiler(Protocol):
    """Compiles steps into graphs."""

    @property
    def statistics(self) -> CompileStatistics:
        """Counts and seconds so far."""

    def graph(self, name: str, step: nn.Module, arguments: Sequence[Any]) -> Graph:
        """Compiles `step` for arguments of these shapes. Raises GraphRefused after `seal`."""

    def seal(self) -> None:
        """Ends warm-up: a missing graph is an error from now on."""


class TorchCompiler:
    """Compiles with torch.compile and a dynamo backend, by name or function."""

    def __init__(self, backend: str | Backend) -> None:
        self.statistics = CompileStatistics()
        self._backend, self._sealed = backend, False

    def graph(self, name: str, step: nn.Module, arguments: Sequence[Any]) -> Graph:
        if self._sealed:
            raise GraphRefused(f"{name}: a graph was requested after warm-up")
        run = torch.compile(step, fullgraph=True, dynamic=False, backend=self._compile)
        bucket = arguments[-1].shape

        def call(*given: Any) -> Any:
            if given[-1].shape != bucket:
                raise GraphRefused(f"{name}: rows of shape {list(given[-1].shape)} are not the bucket's {list(bucket)}")
            with torch.no_grad():
                return run(*given)

        began = time.perf_counter()
        with torch._dynamo.config.patch(recompile_limit=BUCKETS_AT_MOST):
            call(*arguments)
        seconds = time.perf_counter() - began
        log.info("graph %s: compiled and run once in %.1f s", name, seconds)
        self.statistics.compile_seconds += seconds
        return call

    def seal(self) -> None:
        self._sealed = True

    def _compile(self, module: Any, example: list[Any]) -> Any:
        if self._sealed:
            raise GraphRefused("a step was about to be compiled again after warm-up")
        self.statistics.compiled += 1
        from torch._dynamo import lookup_backend

        backend = lookup_backend(self._backend) if isinstance(self._backend, str) else self._backend
        return backend(module, example)


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

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": host.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "flags": first_processor().get("flags", ""),
        "threads": torch.get_num_threads(),
    }


def _source() -> str:
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in _SOURCES)).hexdigest()


def graph_compiler(
    platform: Platform, identity: RunnerIdentity, limits: Limits, only: Sequence[int] | None, folder: str | None = None
) -> Callable[[str], GraphCompiler]:
    """Returns a function from a purpose ("target", "draft", ...) to its compiler. `folder`: of packages."""
    if platform.graphs == "compiled":
        return lambda what: TorchCompiler(platform.backend)
    facts = {"weights": identity.weights_revision, "dtype": identity.dtype, "limits": asdict(limits), "only": only}
    name, root = re.sub(r"[^\w.-]+", "-", identity.model_name), platform.kept(folder)
    return lambda what: PackageCompiler(package_folder(root, name, {"what": what, **facts}, keeps=folder is not None))

"""Compiles step modules into graphs, one per bucket, before a server is ready and never later."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tandem.runners.protocol import Limits, RunnerIdentity
from tandem.runners.torch.platforms import Platform

Graph = Callable[..., Any]
Backend = Callable[..., Any]  # a dynamo backend: (traced module, example inputs) -> callable
BUCKETS_AT_MOST = 256  # graphs that dynamo may hold for the code of one step


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

    def __init__(self, backend: str | Backend = "inductor", options: Mapping[str, object] | None = None) -> None:
        self.statistics = CompileStatistics()
        self._backend, self._options = backend, dict(options or {})
        self._sealed = False

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
        self.statistics.compile_seconds += time.perf_counter() - began
        return call

    def seal(self) -> None:
        self._sealed = True

    def _compile(self, module: Any, example: list[Any]) -> Any:
        if self._sealed:
            raise GraphRefused("a step was about to be compiled again after warm-up")
        self.statistics.compiled += 1
        from torch._dynamo import lookup_backend

        backend = lookup_backend(self._backend) if isinstance(self._backend, str) else self._backend
        return backend(module, example, **({"options": self._options} if self._options else {}))


def graph_compiler(
    platform: Platform, identity: RunnerIdentity, limits: Limits, only: Sequence[int] | None, folder: str | None = None
) -> Callable[[str], GraphCompiler]:
    """Returns a function from a purpose ("target", "draft", ...) to its compiler. `folder`: of packages."""
    if platform.graphs == "compiled":
        return lambda what: TorchCompiler(platform.backend, platform.options)

    def packages(what: str) -> GraphCompiler:
        from tandem.runners.torch.artifacts import PackageCompiler, package_folder

        facts = {
            "what": what,
            "weights": identity.weights_revision,
            "dtype": identity.dtype,
            "limits": asdict(limits),
            "only": only,
        }
        name, root = re.sub(r"[^\w.-]+", "-", identity.model_name), platform.kept(folder)
        return PackageCompiler(package_folder(root, name, facts, keeps=folder is not None))

    return packages

"""Runs main.py with a stand-in for a Neuron device that refuses what the real one would, while a server serves.

    python -m tests.runners.strict_device REPORT main.py's arguments...

The platform `neuron` is TorchNeuron's, on the CPU's tensors. Its compiler is the strict one of graph_check.py: a step
with a host read, another dtype or an operation that is not on the list cannot be compiled. From the moment the server
is ready, nothing is compiled, and what graphs return may only be copied to the host or given to the next graph. Like
the real one it keeps a file for each graph in the folder of compiled code; without a device
(TORCH_NEURONX_COMPILE_ONLY) asking the runtime for anything is a mistake.
REPORT gets one JSON object as the process ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.runners.torch import platforms
from tandem.runners.torch.graphs import Graph, GraphCompiler
from tandem.runners.torch.platforms import CPU, NEURON
from tandem.services import server
from tests.runners.graph_check import StrictBackend

COPIES = frozenset({"tolist", "cpu"})
LOOKS = frozenset({"__get__", "size", "dim", "__len__"})


class Refused(RuntimeError):
    """Something other than a graph was about to run on the device."""


class OnDevice(Tensor):
    """What a graph returned. While a server serves, it may be copied to the host, and nothing else."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        name = function.__name__
        if DEVICE.serving and name not in LOOKS:
            if name not in COPIES:
                DEVICE.refused.append(name)
                raise Refused(f"{name} would run on the device between graphs")
            DEVICE.copies += 1
        return function(*plain(arguments), **(keywords or {}))


class Device:
    """What happened on it since the server is ready."""

    def __init__(self) -> None:
        self.backend, self.serving = StrictBackend(), False
        self.made = self.calls = self.copies = self.found = 0
        self.refused: list[str] = []

    def ready(self) -> None:
        self.serving, self.made = True, len(self.backend.graphs)

    def keep(self, arguments: Sequence[Any]) -> None:
        """Looks for the newest graph's file, and makes it if it is not there."""
        if folder := os.environ.get(str(NEURON.code)):
            shapes = [(value.shape, value.dtype) for value in plain(list(arguments)) if isinstance(value, Tensor)]
            text = f"{self.backend.graphs[-1].module.code}{shapes}"
            file = Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()}.neff"
            self.found += file.exists()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    def graph(self, compiled: Graph) -> Graph:
        def call(*given: Any) -> Any:
            self.calls += self.serving
            return wrapped(compiled(*plain(given)))

        return call

    def report(self) -> dict[str, Any]:
        after = len(self.backend.graphs) - self.made
        seen = {
            "graphs": self.made,
            "found": self.found,
            "compiled_later": after,
            "calls": self.calls,
            "copies": self.copies,
        }
        return {**seen, "refused": self.refused}


DEVICE = Device()


def plain(values: Any) -> Any:
    """The values with the device's tensors as ordinary ones."""
    if isinstance(values, OnDevice):
        return values.as_subclass(Tensor)  # type: ignore[arg-type]
    return type(values)(plain(value) for value in values) if isinstance(values, list | tuple) else values


def wrapped(values: Any) -> Any:
    if isinstance(values, list | tuple):
        return type(values)(wrapped(value) for value in values)
    return values.as_subclass(OnDevice) if isinstance(values, Tensor) else values


def no_runtime() -> Any:
    raise AssertionError("the runtime was asked although there is no device")


def install() -> None:
    """Puts the stand-in in the place of the platform `neuron`."""
    here = {"absent": lambda: None, "backend": DEVICE.backend}
    here["collectives"] = CPU.collectives
    if platforms.compiles_only():  # AWS's wheels are there, as it were, and no device
        del here["absent"]
        platforms.missing, platforms._neuron = lambda *asked: None, no_runtime
    platforms.PLATFORMS["neuron"] = replace(NEURON, device="cpu", **here)
    os.environ.update({str(NEURON.code): "", **dict.fromkeys(NEURON.environment, "")})
    compiled, announce = GraphCompiler.graph, server._announce

    def graph(self: GraphCompiler, name: str, step: Any, arguments: Sequence[Any]) -> Graph:
        made = compiled(self, name, step, arguments)
        DEVICE.keep(arguments)
        return DEVICE.graph(made)

    def announced(*arguments: Any) -> None:
        DEVICE.ready()
        announce(*arguments)

    GraphCompiler.graph = graph  # type: ignore[method-assign]
    server._announce = announced


def main() -> int:
    report, *arguments = sys.argv[1:]
    install()
    from tandem.cli.main import main as run

    try:
        return run(arguments)
    finally:
        Path(report).write_text(json.dumps(DEVICE.report()))


if __name__ == "__main__":
    sys.exit(main())

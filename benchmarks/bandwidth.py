"""Measures memory bandwidth and derives the least time per token: a step reads every weight, key and value once."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEGABYTES = (256, 512, 1024)  # far larger than any last-level cache
SECONDS = 0.4
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INT8_BYTES = 34 / 32  # of a weight: 32 share a scale of two bytes
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Reading:
    """The bandwidth of reading one buffer one way."""

    kernel: str
    megabytes: int
    threads: int
    best: float  # of its passes, bytes per second
    median: float


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time of a step at batch 1."""

    bandwidth: float
    weight_bytes: int
    kv_bytes_per_token: int  # read for each earlier token

    def seconds(self, context: float) -> float:
        """Returns the least seconds of a step that attends to `context` tokens."""
        return (self.weight_bytes + self.kv_bytes_per_token * context) / self.bandwidth


def bandwidth_of(readings: list[Reading], threads: int) -> float:
    """Returns the best bandwidth with this number of threads. Raises ValueError."""
    found = [reading.best for reading in readings if reading.threads == threads]
    if not found:
        raise ValueError(f"threads: nothing was read with {threads}")
    return max(found)


def limit_of(folder: Path, dtype: str, bandwidth: float, weight_bytes: float | None = None) -> Limit:
    """Computes a checkpoint's limit, with `weight_bytes` per weight if given. Raises ValueError without safetensors."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    keys = config.get("num_key_value_heads", heads) * head_dim
    return Limit(
        bandwidth,
        round(step_parameters(parameters(folder)) * (weight_bytes or BYTES[dtype])),
        2 * keys * config["num_hidden_layers"] * BYTES["bfloat16" if weight_bytes else dtype],
    )


def parameters(folder: Path) -> dict[str, tuple[int, ...]]:
    """Reads names and shapes of the weights from safetensors headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    if not shapes:
        raise ValueError(f"{folder}: no safetensors, so what a step reads is not known")
    return shapes


def step_parameters(shapes: dict[str, tuple[int, ...]]) -> int:
    """Counts the parameters that a step reads: of an input-only embedding one row."""
    total = sum(math.prod(shape) for shape in shapes.values())
    if EMBEDDING in shapes and HEAD in shapes:
        rows, columns = shapes[EMBEDDING]
        total -= (rows - 1) * columns
    return total


def measure(threads: int, megabytes: tuple[int, ...] = MEGABYTES, seconds: float = SECONDS) -> list[Reading]:
    """Reads buffers of several sizes in several ways, with `threads` threads and with one."""
    import torch

    before = torch.get_num_threads()
    readings: list[Reading] = []
    try:
        for size in megabytes:
            buffer = torch.ones(size * 2**20 // 8, dtype=torch.int64)
            for count in sorted({1, threads}):
                torch.set_num_threads(count)
                for name, read in _kernels(buffer).items():
                    rates = [buffer.nbytes / taken for taken in _passes(read, seconds)]
                    readings.append(Reading(name, size, count, max(rates), statistics.median(rates)))
    finally:
        torch.set_num_threads(before)
    return readings


def _kernels(buffer: Any) -> dict[str, Callable[[], Any]]:
    """Returns the ways to read a buffer; the fastest depends on the machine and on torch."""
    import torch

    floats = buffer.view(torch.float32)
    return {
        "largest float32": floats.amax,
        "sum of bfloat16": buffer.view(torch.bfloat16).sum,
        "sum of int64": buffer.sum,
    }


def _passes(read: Callable[[], Any], seconds: float) -> list[float]:
    read()
    taken: list[float] = []
    while not taken or sum(taken) < seconds:
        began = time.perf_counter()
        read()
        taken.append(time.perf_counter() - began)
    return taken

"""Decides whether vLLM's servers run beside each other or one after the other."""

from __future__ import annotations

from pathlib import Path

from tandem.comparison.measuring.architectures import AUTOREGRESSIVE
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.vllm.commands import KV_GIBIBYTES
from tandem.comparison.vllm.probe import Found
from tandem.comparison.vllm.settings import started_here
from tandem.host.memory import free_bytes

OF_A_PROCESS = 2 << 30
"""Bytes that a server takes besides weights and KV cache: two processes with torch."""
WIDEST = 2
"""Bytes in memory for each byte of a file: weights stored in 16 bits may be served in 32."""


def vllm_turns(config: ComparisonConfig, found: Found | None, free: int | None = None) -> list[tuple[str, ...]]:
    """Returns which servers run at the same time: all if this machine has the memory, else one after the other.

    A vLLM takes most of a GPU's memory, so there it is always one. Plain decoding is the last, as everywhere. Those
    that run already have their memory, and have one turn. `found`: what starts the others; None: there are none.
    """
    asked, started = config.architectures, started_here(config)
    room = free_bytes() if free is None else free
    if found is None or (found.device == "cpu" and (room is None or len(started) * needed(config) <= room)):
        return [asked]
    connected = tuple(name for name in asked if name in config.connect)
    turns = [*((name,) for name in started), *([connected] if connected else [])]
    return sorted(turns, key=lambda turn: AUTOREGRESSIVE.name in turn)


def needed(config: ComparisonConfig) -> int:
    """Returns the bytes that one server is expected to take, at most."""
    files = [file for model in (config.model, config.draft_model) if model for file in _files(Path(model))]
    weights = WIDEST * sum(file.stat().st_size for file in files)
    return weights + (int(KV_GIBIBYTES) << 30) + OF_A_PROCESS


def _files(folder: Path) -> list[Path]:
    return [file for pattern in ("*.safetensors", "*.bin", "*.gguf") for file in folder.glob(pattern)]

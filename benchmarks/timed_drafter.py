"""vLLM's RemoteDrafter with the seconds of each step in a file, one a line."""

from __future__ import annotations

import os
import time
from typing import Any

from tandem.vllm import RemoteDrafter

VARIABLE = "BENCHMARK_DRAFTER_SECONDS"  # names the file


class TimedDrafter(RemoteDrafter):
    """Records how long vLLM waits for each `propose`."""

    def propose(self, *given: Any, **named: Any) -> list[list[int]]:
        began = time.perf_counter()
        drafts = super().propose(*given, **named)
        seconds = time.perf_counter() - began
        with open(os.environ[VARIABLE], "a", encoding="ascii") as file:
            file.write(f"{seconds:.6f}\n")
        return drafts

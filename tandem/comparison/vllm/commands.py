"""Builds the command and the environment of a vLLM server."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from tandem.comparison.measuring.config import MIN_SLOTS, ComparisonConfig
from tandem.comparison.vllm.settings import FORMS, speculation
from tandem.launch import checkout
from tandem.launch import environment as launched

SERVER = "vllm.entrypoints.openai.api_server"
KV_GIBIBYTES = "1"
"""The KV cache of a server on a CPU, so that several have room beside each other."""
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def serve_flags(config: ComparisonConfig, architecture: str) -> list[str]:
    """Returns the flags of vLLM's OpenAI server, without its address. Prefixes are not shared, as with our servers."""
    flags = ["--model", str(config.model), "--max-model-len", str(config.sequence_length)]
    flags += ["--max-num-seqs", str(config.slots or MIN_SLOTS), "--no-enable-prefix-caching"]
    flags += [] if config.dtype == "auto" else ["--dtype", config.dtype]
    drafts = speculation(architecture, config.speculation_length or 0, config.draft_model)
    flags += [] if drafts is None else ["--speculative-config", json.dumps(drafts)]
    return [*flags, *shlex.split(config.vllm_args)]


def server_command(config: ComparisonConfig, python: str, architecture: str, port: int) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    return [python, "-m", SERVER, *serve_flags(config, architecture), *where]


def serving(config: ComparisonConfig, architecture: str, worker: str) -> str:
    """Returns the line that serves an architecture as it was measured. `worker`: the draft worker's address."""
    drafts = {"TANDEM_DRAFT_WORKERS": worker, "TANDEM_DRAFT_FORM": FORMS[architecture]} if architecture in FORMS else {}
    flags = shlex.join(["python", "-m", SERVER, *serve_flags(config, architecture)])
    return " ".join([*(f"{name}={value}" for name, value in drafts.items()), flags])


def environment(threads: int | None = None) -> dict[str, str]:
    """Returns the environment of vLLM's Python: Tandem is importable there from a checkout.

    A package that was installed is not: all that is beside it would be imported in place of vLLM's own libraries.
    """
    variables = {"VLLM_CPU_KVCACHE_SPACE": KV_GIBIBYTES, **(launched() if checkout() else os.environ), **_QUIET}
    if threads is not None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return variables


def drafter_settings(architecture: str, worker: str, metrics_port: int) -> dict[str, str]:
    """Returns the variables of our drafter; others of its that this process has go to it as they are."""
    chosen = {"WORKERS": worker, "FORM": FORMS[architecture], "METRICS_PORT": str(metrics_port)}
    return {f"TANDEM_DRAFT_{name}": value for name, value in chosen.items()}


def installing(python: str) -> str:
    """Returns the command that installs vLLM beside this copy of Tandem."""
    script = (checkout() or Path()) / "benchmarks" / "install_vllm_cpu.sh"
    if script.is_file():
        return f"sh {shlex.quote(str(script))} .venv-vllm"
    return f"{python} -m venv .venv-vllm && .venv-vllm/bin/pip install vllm tandem-speculative"

"""`compare`: runs a comparison of architectures from Python and returns what it found."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from tandem.comparison.analysis.comparison import Comparison, analyse
from tandem.comparison.measuring.architectures import OPENAI
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.driver import Connect, measure, started
from tandem.comparison.measuring.interruption import Interruption
from tandem.comparison.measuring.openai_client import OpenAIClient
from tandem.comparison.measuring.progress import Progress
from tandem.comparison.measuring.record_log import RecordLog
from tandem.comparison.measuring.workloads import Prompt, built_in_prompts, given_prompts
from tandem.comparison.report.publish import write_files
from tandem.rpc.credentials import Credentials
from tandem.rpc.generation_client import GenerationClient


def compare(
    prompts: Sequence[str | Prompt] = (),
    *,
    output_dir: str | Path | None = None,
    progress: bool = False,
    **settings: Any,
) -> Comparison:
    """Measures the same prompts on every architecture and returns the comparison, which `print` shows in short.

    Starts the servers it needs, or uses those named in `connect`, and stops what it started. The settings are the
    fields of `ComparisonConfig`, for instance `model`, `draft_model`, `architectures`, `rtts_ms`, `max_new_tokens`.
    With `concurrency=(1, 4)` or `rate=(0.5, 2.0)` (requests per second), loads are measured too.

    Args:
        prompts: texts or `Prompt`s; the built-in workloads if empty.
        output_dir: folder for comparison.json, comparison.csv, the report, the records and the servers' logs.
            Without it, files are temporary; they are kept only if the comparison fails.
        progress: whether to show progress on stderr.

    Raises:
        TypeError: for a setting that there is not.
        ValueError: for a setting that is out of range, and where no request was measured.
        RuntimeError: if a server does not start, cannot be reached or dies, or if the link cannot be emulated here.

    It blocks until it is done, a running event loop too (a notebook's); `asyncio.to_thread` keeps one free.

    A request that fails is recorded in the result; it does not raise.
    """
    folder = Path(tempfile.mkdtemp(prefix="tandem-compare-")) if output_dir is None else Path(output_dir)
    config = ComparisonConfig(prompts=_prompts(prompts), output_dir=folder, **settings)
    shown = Progress(None if progress else Console(quiet=True))
    with RecordLog(started(config)) as log:
        _run(measure(log, connector(config), Interruption(), shown))
    comparison = analyse(log.measured)
    if output_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        write_files(comparison, log.measured)
    return comparison


def _run(work: Coroutine[Any, Any, object]) -> None:
    """Runs a coroutine in an event loop of its own, which needs a thread where one runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


def connector(config: ComparisonConfig) -> Connect:
    """Returns a function that opens a client; it shows the credentials to the servers named in `connect` only."""

    def connect(address: str, service: str) -> GenerationClient | OpenAIClient:
        if service == OPENAI.service:
            shown = config.credentials if config.credentials.insecure or _hidden(address) else Credentials()
            token = shown.token()
            return OpenAIClient(address, token.current() if token else None)
        theirs = address in config.connect.values()
        return GenerationClient.connect(address, service, config.credentials if theirs else None)

    return connect


def _hidden(url: str) -> bool:
    """Whether what is sent to an OpenAI server is encrypted or stays on this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname in ("localhost", "127.0.0.1", "::1")


def _prompts(prompts: Sequence[str | Prompt]) -> tuple[Prompt, ...]:
    texts = iter(given_prompts([prompt for prompt in prompts if isinstance(prompt, str)]))
    return tuple(next(texts) if isinstance(prompt, str) else prompt for prompt in prompts) or built_in_prompts()

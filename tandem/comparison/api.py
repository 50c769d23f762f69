"""`compare`: runs a comparison from Python."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem.clients.background_loop import run_apart
from tandem.clients.openai_client import OpenAIClient
from tandem.comparison.analysis.comparison import Comparison, analyse
from tandem.comparison.measuring.architectures import OPENAI
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.driver import Connect, measure, started
from tandem.comparison.measuring.interruption import Interruption
from tandem.comparison.measuring.progress import Progress
from tandem.comparison.measuring.record_log import RecordLog
from tandem.comparison.measuring.workloads import Prompt, built_in_prompts, given_prompts
from tandem.comparison.report.publish import write_files
from tandem.rpc.generation_client import GenerationClient


def compare(
    prompts: Sequence[str | Prompt] = (),
    *,
    output_dir: str | Path | None = None,
    progress: bool = False,
    **settings: Any,
) -> Comparison:
    """Measures the same prompts on every architecture and returns the comparison; `print` shows it in short.

    Starts the servers that `connect` does not name, and stops them. Failed requests are recorded, not raised. Blocks a
    running event loop too (a notebook's); `asyncio.to_thread` keeps it free.

    Args:
        prompts: texts or `Prompt`s; the built-in workloads if empty.
        output_dir: for comparison.json, report, records and logs. None: temporary, kept on failure.
        progress: whether to show progress on stderr.
        settings: fields of `ComparisonConfig`, named as the flags: `model`, `architectures`, `rtt_ms=(0.0, 20.0)`,
            `concurrency=(1, 4)`.

    Raises:
        TypeError: for an unknown setting.
        ValueError: for a setting out of range, or if no request was measured.
        RuntimeError: if a server does not start, answer or live, or the link cannot be emulated.
    """
    folder = Path(tempfile.mkdtemp(prefix="tandem-compare-")) if output_dir is None else Path(output_dir)
    config = ComparisonConfig(prompts=_prompts(prompts), output_dir=folder, **settings)
    shown = Progress(None if progress else Console(quiet=True))
    with RecordLog(started(config)) as log:
        run_apart(measure(log, connector(config), Interruption(), shown))
    comparison = analyse(log.measured)
    if output_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        remarks: list[str] = []
        write_files(comparison, log.measured, remarks)
        if remarks:
            raise OSError("; ".join(remarks))
    return comparison


def connector(config: ComparisonConfig) -> Connect:
    """Returns a function that opens a client; only servers in `connect` get credentials."""

    def connect(address: str, service: str) -> GenerationClient | OpenAIClient:
        if service == OPENAI.service:
            return OpenAIClient.connect(address, config.credentials)
        theirs = address in config.connect.values()
        return GenerationClient.connect(address, service, config.credentials if theirs else None)

    return connect


def _prompts(prompts: Sequence[str | Prompt]) -> tuple[Prompt, ...]:
    texts = iter(given_prompts([prompt for prompt in prompts if isinstance(prompt, str)]))
    return tuple(next(texts) if isinstance(prompt, str) else prompt for prompt in prompts) or built_in_prompts()

"""Waits until another project's HTTP server is ready."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path

from tandem.comparison.measuring.servers import ServerFailed

LOOK_SECONDS = 0.2


async def until_healthy(name: str, process: asyncio.subprocess.Process, url: str, log: Path, timeout_s: float) -> None:
    """Returns when `url` answers with success. Raises ServerFailed."""
    began = time.monotonic()
    while not await asyncio.to_thread(_healthy, url):
        if process.returncode is not None:
            raise ServerFailed(name, f"ended with {process.returncode} while starting", log, process.returncode)
        if time.monotonic() - began > timeout_s:
            raise ServerFailed(name, f"was not ready after {timeout_s:g} s", log, None)
        await asyncio.sleep(LOOK_SECONDS)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False

"""Shows start-up progress on a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

from tandem.runners.startup import Startup

log = logging.getLogger("tandem.server")
FIRST_SECONDS, EVERY_SECONDS = 1.5, 4.0


@contextlib.contextmanager
def progress(startup: Startup) -> Iterator[None]:
    """Logs start-up stages regularly while the block runs; without a terminal, once at the end."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def speak() -> None:
        wait = max(0.0, FIRST_SECONDS - startup.total())
        while not done.wait(wait):
            log.info("starting: %s, %.0f s so far", startup.now, startup.total())
            wait = EVERY_SECONDS

    speaking = threading.Thread(target=speak, name="progress", daemon=True)
    speaking.start()
    try:
        yield
    finally:
        done.set()
        speaking.join()

"""Says on a terminal what a start is doing, as long as it lasts."""

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
    """Logs the stage of the start soon after the process began and then regularly, within the `with` block.

    A log that goes elsewhere than to a terminal has the line of all stages at the end, and no others.
    """
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

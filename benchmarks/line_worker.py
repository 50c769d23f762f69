"""Answers JSON lines with another engine, in its own Python environment and without importing Tandem.

The first line has the settings, and is answered once the model is warm; each later line is a batch of prompts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(start: Callable[[dict[str, Any]], tuple[Answer, dict[str, Any]]]) -> None:
    """Answers requests from stdin until it is closed. `start` returns the engine and its description."""
    _end_with_parent()
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer: Answer | None = None
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if answer is None:
                answer, reply = start(asked)
            else:
                reply = answer(asked)
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {said[0]}"}
        answers.write(json.dumps(reply) + "\n")


def _end_with_parent() -> None:
    """Asks Linux to end this process with its parent: closed stdin is noticed only between answers."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

"""Upper bounds on real time that a busy machine cannot break: of many attempts one must keep them."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.support import HANG

ROOM = 0.1
"""Seconds by which an attempt may exceed what is asked for."""


def promptly(attempt: Callable[[], float], least: float, room: float = ROOM) -> None:
    """Every attempt takes `least` seconds at least, and one of them at most `room` longer.

    Load delays some attempts. What delays every one of them is a fault of the code.
    """
    give_up = time.monotonic() + HANG
    while not least <= (took := attempt()) < least + room:
        assert took >= least, f"{took} s, and never below {least}"
        assert time.monotonic() < give_up, f"the last of many took {took} s, and not one below {least + room}"


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.monotonic()
    action()
    return time.monotonic() - began

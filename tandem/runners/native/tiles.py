"""Says whether products of many tokens go through AMX tiles (tiles.h)."""

from __future__ import annotations

import enum
import functools
import logging
from typing import Any

log = logging.getLogger("tandem.engine")


class TileState(enum.IntEnum):
    """What becomes of AMX tiles in this process: TileState of tiles.h."""

    NONE = 0
    USED = 1
    REFUSED = 2
    WRONG = 3
    OFF = 4


_SAID = {
    TileState.USED: (logging.INFO, "products of quantised weights and 9 or more tokens go through AMX tiles"),
    TileState.REFUSED: (logging.INFO, "this CPU has AMX tiles; the system refuses them, so products go without"),
    TileState.WRONG: (
        logging.WARNING,
        "AMX tiles give other sums here than other instructions do, so products go without them; please report it",
    ),
}


def use_tiles(library: Any, use: bool = True) -> TileState:
    """Switches AMX tiles on (where this process can use them) or off for all its models, and returns the new state.

    A library of older sources, which benchmarks time beside these, has no tiles.
    """
    asked = getattr(library, "tandem_tiles", None)
    return TileState.NONE if asked is None else TileState(asked(int(use)))


def say_tiles(library: Any) -> None:
    """Logs whether tiles are used; the first call of a process tries them."""
    log_once(use_tiles(library))


@functools.cache
def log_once(state: TileState) -> None:
    """Logs what a state means, the first time."""
    if said := _SAID.get(state):
        log.log(*said)

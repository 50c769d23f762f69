"""A server process of ours whose device hangs: every step waits for as long as a file is there.

    python -m tests.services.hanging FILE --role target --backend toy ...

With `load` in place of `step` in the file, loading waits instead; with `expiry` or `watch` the task of that name fails.
FILE.hangs says that something hangs. The process
has a second to end beyond its drain. What follows FILE are main.py's arguments.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tandem.engine.load_models
import tandem.services.server
import tests.toy
from tandem.cli import main
from tandem.engine.step_watch import StepWatch
from tandem.services.sessions.table import SessionTable
from tests.toy import ToyRunner


def hangs(gate: Path) -> Path:
    """There once something hangs."""
    return gate.with_name(f"{gate.name}.hangs")


def wait_while(gate: Path, text: str) -> None:
    """Calls no Python function while it waits, so that a list of where threads stand says `wait_while`."""
    if gate.exists():
        hangs(gate).touch()
    path, expected = str(gate), text.encode()
    while True:
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return
        found = os.read(file, 64)
        os.close(file)
        if found != expected:
            return
        time.sleep(0.005)


def install(gate: Path) -> None:
    """Toy runners hang from now on, while the file is there."""
    make = tests.toy.toy_runner

    class Hanging(ToyRunner):
        def work(self) -> None:
            super().work()
            wait_while(gate, "step")

    def hanging(*rest: Any) -> ToyRunner:
        toy = make(*rest)
        return Hanging(toy.limits, toy.config)

    tests.toy.toy_runner = hanging


def install_load(gate: Path) -> None:
    """Loading hangs on the device thread, as a device that is not there does."""
    load = tandem.engine.load_models._load

    async def hanging(config: Any, model: Any, request: Any, batcher: Any, *rest: Any, **more: Any) -> Any:
        await batcher.on_device(wait_while, gate, "load")
        return await load(config, model, request, batcher, *rest, **more)

    tandem.engine.load_models._load = hanging


def failing(method: Callable[..., Any], gate: Path, word: str) -> Callable[..., Any]:
    def fails(*arguments: Any) -> Any:
        if gate.exists() and gate.read_text() == word:
            raise OSError(f"the {word} fails")
        return method(*arguments)

    return fails


if __name__ == "__main__":
    tandem.services.server.STOP_SECONDS = 1.0
    install(Path(sys.argv[1]))
    install_load(Path(sys.argv[1]))
    for kind, name, word in ((SessionTable, "seconds_to_expiry", "expiry"), (StepWatch, "look", "watch")):
        setattr(kind, name, failing(getattr(kind, name), Path(sys.argv[1]), word))
    sys.exit(main.main(sys.argv[2:]))

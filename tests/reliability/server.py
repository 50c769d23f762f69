"""A server process of ours with what a campaign needs inside: faults, a history that outlives kill -9, a probe.

    python -m tests.reliability.server --name a --history FILE --seed 3 -- --role target --backend toy ...

What follows `--` are main.py's arguments. The fault interceptor goes behind the server's own. SIGUSR1 writes what the
process holds to the file of `--probe`. Steps hang while the file of `--gate` says "step".
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from tandem.cli import main
from tandem.engine.slots import SlotPool
from tandem.services.sessions.table import SessionTable
from tests.reliability.faults import FaultInterceptor, Schedule
from tests.reliability.history import History
from tests.services import hanging

FAULTS_IN_A_PROCESS = 0.1


def held() -> dict[str, int]:
    """What may leak, and what clients may leave behind."""
    gc.collect()
    found = gc.get_objects()
    pools = [each for each in found if isinstance(each, SlotPool)]
    tables = [each for each in found if isinstance(each, SessionTable)]
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    named = Counter(f"task {_named(task)}" for task in asyncio.all_tasks())
    return dict(sorted(named.items())) | {
        "slots": sum(pool.count - pool.free for pool in pools),
        "sessions": sum(map(len, tables)),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "resident_bytes": resident,
    }


def _named(task: asyncio.Task[Any]) -> str:
    """Returns a task's name and coroutine; asyncio's default names, Task-1 and so on, are left out."""
    name, code = task.get_name(), getattr(task.get_coro(), "__qualname__", "?")
    return code if name.startswith("Task-") else f"{name}: {code}"


def _probe(path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(held()))
    partial.replace(path)


def install(arguments: argparse.Namespace) -> None:
    """Every grpc.aio server that this process makes gets the interceptor, the loop the probe, and steps the gate."""
    if arguments.gate:
        hanging.install(arguments.gate)
    make = grpc.aio.server

    def server(*rest: Any, interceptors: Any = (), **options: Any) -> grpc.aio.Server:
        if arguments.probe:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _probe, arguments.probe)
        if arguments.history:
            schedule = None if arguments.seed is None else Schedule(arguments.seed, FAULTS_IN_A_PROCESS, drops=0)
            interceptors = [*interceptors, FaultInterceptor(schedule, History(arguments.name, arguments.history))]
        return make(*rest, interceptors=interceptors, **options)

    grpc.aio.server = server


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.server")
    parser.add_argument("--name", default="server")
    parser.add_argument("--history", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--probe", type=Path)
    parser.add_argument("--gate", type=Path)
    at = argv.index("--")
    return parser.parse_args(argv[:at]), argv[at + 1 :]


if __name__ == "__main__":
    ours, rest = parse(sys.argv[1:])
    install(ours)
    sys.exit(main.main(rest))

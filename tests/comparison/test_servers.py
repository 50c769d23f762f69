"""Server processes, with a few lines of Python in place of a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.comparison.measuring.servers import Fleet, Server, ServerFailed
from tests.structure_workers import alive, reaped
from tests.support import HANG

# What a server does: say something, write the ready file in one move, wait for SIGTERM.
READY = """
import json, os, signal, sys, time
print("hello from the log", flush=True)
path = sys.argv[sys.argv.index("--ready_file") + 1]
with open(path + ".part", "w") as file:
    json.dump({"host": "127.0.0.1", "port": 4321, "pid": os.getpid(), "startup_seconds": 1.5}, file)
os.replace(path + ".part", path)
"""
WAIT = READY + "time.sleep(60)\n"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT


def python(source: str) -> list[str]:
    return [sys.executable, "-S", "-c", source]


async def start_one(tmp_path: Path, source: str, seconds: float = HANG, grace_s: float = HANG) -> Server:
    async with Fleet(tmp_path / "logs", seconds, grace_s) as fleet:
        server = await fleet.start("target", python(source))
        assert alive(server.process.pid)
        return server


async def test_a_ready_server_has_the_address_of_its_ready_file_and_is_stopped_at_the_end(tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    earlier = {"host": "127.0.0.1", "port": 1, "pid": 1, "startup_seconds": 0}
    (logs / "target.ready.json").write_text(json.dumps(earlier))  # does not count
    server = await start_one(tmp_path, WAIT)
    assert (server.address, server.startup_seconds) == ("127.0.0.1:4321", 1.5)
    assert server.log == tmp_path / "logs" / "target.log"
    assert "hello from the log" in server.log.read_text()
    assert reaped(server.process.pid)
    assert server.process.returncode == -15


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    assert (await start_one(tmp_path, STUBBORN, grace_s=0.3)).process.returncode == -9


async def test_a_server_that_dies_is_quoted_with_the_end_of_its_log(tmp_path: Path) -> None:
    source = "import sys; [print('line', i) for i in range(40)]; sys.exit('the weights are gone')"
    with pytest.raises(ServerFailed) as caught:
        await start_one(tmp_path, source)
    first, *tail = str(caught.value).splitlines()
    assert first == f"server target exited with code 1 while starting (log: {tmp_path / 'logs' / 'target.log'})"
    assert tail[-2:] == ["  line 39", "  the weights are gone"] and "  line 5" not in tail


async def test_a_server_that_is_never_ready_is_given_up_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that jumps once it has said something."""
    log = tmp_path / "logs" / "target.log"
    looked: list[float] = []

    def clock() -> float:
        looked.append(1.0 if looked and log.exists() and "loading" in log.read_text() else 0.0)
        return looked[-1]

    monkeypatch.setattr("tandem.comparison.measuring.servers.time", SimpleNamespace(monotonic=clock))
    source = "import os, time; print(os.getpid(), 'still loading', flush=True); time.sleep(600)"
    with pytest.raises(ServerFailed, match=r"was not ready after 0.5 s: \d+ still loading"):
        await start_one(tmp_path, source, 0.5)
    assert reaped(int(log.read_text().split()[0]))

"""Tasks that a server cannot do without: each one that ends is started again and seen, or the process ends."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tandem.ports import free_port
from tandem.services.health import NOT_SERVING, SERVING
from tandem.services.server import keep
from tandem.services.sessions.table import Checkout, Session, SessionTable
from tandem.speculation.types import SamplingParams
from tests.daily import daily
from tests.services.test_ending import ENDS, health_becomes
from tests.support import run, server_process, until


class Work:
    """A task that ends at once, so many times, and then runs on."""

    def __init__(self, *ends: Exception | None) -> None:
        self.left, self.runs = list(ends), 0

    async def __call__(self) -> None:
        self.runs += 1
        if self.left:
            if error := self.left.pop(0):
                raise error
            return
        await asyncio.Event().wait()


@pytest.mark.parametrize("sound_seconds", [300.0, -1.0])
def test_a_task_is_started_again_until_it_ended_too_often_and_is_down_meanwhile(
    sound_seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.services.server.RESTARTS", (0.0,) * 3)
    monkeypatch.setattr("tandem.services.server.SOUND_SECONDS", sound_seconds)

    async def test() -> None:
        said: list[bool] = []
        failing = Work(OSError("no more files"), None, *[OSError("as before")] * 7)
        task = asyncio.create_task(keep("the task", failing, said.append))
        if sound_seconds < 0:  # each time it ran long enough to have all restarts again
            await until(lambda: failing.runs == 10)
            assert said == [False, True] * 9 and not task.done()
            task.cancel()
            return
        await task
        assert (failing.runs, said) == (4, [*[False, True] * 3, False])

    with caplog.at_level(logging.ERROR, "tandem.server"):
        run(test())
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:2] == [
        "the task ended (no more files): not ready until it runs again, in 0 s",
        "the task ended (it returned): not ready until it runs again, in 0 s",
    ]
    assert "OSError: no more files" in caplog.text
    assert (messages[-1] == "the task ended too often: the server stops") is (sound_seconds > 0)


# --- what the tasks do ---


def expired_table() -> SessionTable:
    now = iter([0.0, 0.0, 0.0, *[100.0] * 9])
    table: SessionTable = SessionTable(lambda: next(now), 10.0)
    for name in "abc":
        table.admit(name, f"slot of {name}", SamplingParams(), [1], 100)  # type: ignore[arg-type]
    return table


def test_a_session_that_cannot_be_freed_keeps_no_other_from_it(caplog: pytest.LogCaptureFixture) -> None:
    freed: list[str] = []

    async def free(session: Session) -> None:
        if session.sequence == "slot of a":
            raise OSError("cannot be freed")
        freed.append(session.sequence)

    run(Checkout(expired_table(), free).expire())
    assert freed == ["slot of b", "slot of c"]
    assert "session a expired, and freeing it failed" in caplog.text and "cannot be freed" in caplog.text


# --- a server process ---

FAILING = ("-m", "tests.services.failing_tasks")
OFTEN = ("--step_seconds", "0.4", "--drain_seconds", "0.2")
LEASE = ("--lease_seconds", "0.2")
SERVERS = {
    "the leases of a target": ("expiry", "--role", "target", *LEASE),
    "the leases of a draft worker": ("expiry", "--role", "draft_worker", "--propose_only", *LEASE),
    "the watch over steps": ("watch", "--role", "fused_target"),
}


@pytest.mark.parametrize("task", daily(SERVERS, 0, 2))
def test_a_server_whose_task_fails_is_not_ready_until_it_runs_again(tmp_path: Path, task: str) -> None:
    word, *flags = SERVERS[task]
    gate, port = tmp_path / "gate", free_port()
    arguments = (*flags, *OFTEN, "--health_port", str(port))
    with server_process(tmp_path, *arguments, program=(*FAILING, str(gate), "100000")) as server:
        places = server.wait_ready(), f"127.0.0.1:{port}"
        for status in (SERVING, NOT_SERVING, SERVING):
            gate.write_text(word if status == NOT_SERVING else "")
            for place in places:
                run(health_becomes(place, status))
        assert server.stop(ENDS) == 0
        assert f"ended (the {word} fails): not ready until it runs again, in 0.05 s" in server.log.read_text()


def test_a_server_whose_task_cannot_be_kept_running_ends_with_1(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with server_process(tmp_path, "--role", "target", *OFTEN, *LEASE, program=(*FAILING, str(gate), "2")) as server:
        server.wait_ready()
        gate.write_text("expiry")
        assert server.process.wait(ENDS) == 1
        assert "the expiry of sessions ended too often: the server stops" in server.log.read_text()

"""Tasks that a server cannot do without: if one ends, the process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.services.sessions.table import Checkout, Session, SessionTable
from tandem.speculation.types import Request
from tests.services.test_ending import ENDS
from tests.support import run, server_process

# --- what the tasks do ---


def expired_table() -> SessionTable:
    now = iter([0.0, 0.0, 0.0, *[100.0] * 9])
    table: SessionTable = SessionTable(lambda: next(now), 10.0)
    for name in "abc":
        table.admit(Session(name, f"slot of {name}", Request(), [1], 100))  # type: ignore[arg-type]
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

SERVERS = {
    "the expiry of sessions": ("expiry", "--role", "target", "--lease_seconds", "0.2"),
    "the watch over steps": ("watch", "--role", "fused_target", "--step_seconds", "0.4"),
}


@pytest.mark.parametrize("task", SERVERS)
def test_a_server_whose_task_fails_says_why_and_ends_with_1(tmp_path: Path, task: str) -> None:
    word, *flags = SERVERS[task]
    gate = tmp_path / "gate"
    program = ("-m", "tests.services.hanging", str(gate))
    with server_process(tmp_path, *flags, "--drain_seconds", "0.2", program=program) as server:
        server.wait_ready()
        gate.write_text(word)
        assert server.process.wait(ENDS) == 1
        assert f"{task} ended (the {word} fails): the server stops" in server.log.read_text()

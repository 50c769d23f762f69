"""Tasks that a server cannot do without: if one ends, the process ends."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from tandem.services.sessions.table import Checkout, Session, SessionTable
from tandem.speculation.types import Request
from tests.services.test_ending import ENDS
from tests.support import server_process

# --- what the tasks do ---


def test_a_session_that_cannot_be_freed_keeps_no_other_from_it(caplog: pytest.LogCaptureFixture) -> None:
    now = iter([0.0, 0.0, 0.0, *[100.0] * 9])
    table = SessionTable(lambda: next(now), 10.0)
    sequences = {name: Mock() for name in "abc"}
    sequences["a"].close.side_effect = OSError("cannot be freed")
    for name, sequence in sequences.items():
        table.admit(Session(name, sequence, Request(), [1], 100))  # type: ignore[arg-type]
    Checkout(table).expire()
    assert all(sequence.close.called for sequence in sequences.values())
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

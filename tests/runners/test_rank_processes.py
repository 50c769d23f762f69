"""Ranks that rank 0 starts: their environment, and who ends with whom."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.engine import rank_processes as module
from tandem.engine.rank_processes import RankProcesses, rank_processes
from tandem.runners.torch.tensor_parallel import Ranks
from tests.support import REPOSITORY

TWO = Ranks(2, starts=True)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{code}", *arguments]


def test_a_rank_gets_what_torchrun_would_set_and_this_process_its_environment_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = dict(os.environ)
    said = python("import json, os; json.dump(dict(os.environ), open(sys.argv[1], 'w'))", str(tmp_path / "said"))
    with rank_processes(TWO, said) as others:
        assert Ranks.from_environment(2) == Ranks(2, 0)
        own = dict(os.environ)
        others.serve(lambda: None)
    assert dict(os.environ) == before
    theirs = json.loads((tmp_path / "said").read_text())
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        assert theirs[name] == own[name]
    assert (own["RANK"], theirs["RANK"], theirs["LOCAL_RANK"], own["OMP_NUM_THREADS"]) == ("0", "1", "1", "3")


def test_a_rank_that_dies_is_named_and_ends_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LEFT", 0.01)
    gave_up, told, codes = threading.Event(), threading.Event(), list[int]()
    others = RankProcesses(lambda code: (codes.append(code), gave_up.set()))
    others.serve(told.set)
    others.start(TWO, python("sys.exit(3)"))
    assert others.died.wait(30) and told.wait(30) and gave_up.wait(30)
    assert codes == [1]
    assert "rank 1" in caplog.text and "ended with code 3: every step needs it" in caplog.text
    others.end(at_once=True)


def test_a_connection_that_breaks_while_loading_because_a_rank_died_is_exit_code_1_without_a_traceback() -> None:
    """No timer is left that would end the process later: one did end test runs, 15 s after this test."""
    codes = list[int]()
    with pytest.raises(SystemExit) as ended, rank_processes(TWO, python("sys.exit(3)"), codes.append):
        raise RuntimeError("Connection closed by peer")
    assert ended.value.code == 1
    assert not any(_would_end(thread, codes.append) for thread in threading.enumerate())


def _would_end(thread: threading.Thread, give_up: object) -> bool:
    """Whether `thread` is a timer that is still due to call `give_up`."""
    return isinstance(thread, threading.Timer) and thread.function == give_up and not thread.finished.is_set()


def test_an_error_of_rank_0_itself_is_raised_and_ends_the_others() -> None:
    with pytest.raises(ValueError, match="its own"), rank_processes(TWO, python("sys.stdin.read()")):
        raise ValueError("its own")


def test_a_rank_that_was_told_to_leave_may_end_by_itself() -> None:
    others = RankProcesses(lambda code: pytest.fail("it was told to leave"))
    others.start(TWO, python(""))
    others.serve(lambda: pytest.fail("it was told to leave"))
    others.end(at_once=False)
    assert not others.died.is_set()


def test_kill_9_of_rank_0_ends_the_others() -> None:
    follower = (
        "from tandem.engine.rank_processes import end_with_rank_0; end_with_rank_0(); import time; time.sleep(600)"
    )
    leader = (
        "from tandem.engine.rank_processes import RankProcesses\n"
        "from tandem.runners.torch.tensor_parallel import Ranks\n"
        f"RankProcesses().start(Ranks(2, starts=True), {python(follower)!r})\n"
        "import time; time.sleep(600)"
    )
    # Whoever holds the pipe's end has not ended: reading it returns when both have.
    process = subprocess.Popen(python(leader), stdout=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text().split():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    assert process.stdout is not None and process.stdout.read() == b""
    process.stdout.close()

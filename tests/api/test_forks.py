"""A forked child has an error at once, or an answer: gRPC's asyncio does not go through a fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import HANG, REPOSITORY, server_process

CHILD = """
import asyncio, os, signal, sys
import tandem

address, used = sys.argv[1], sys.argv[2] == "used"
before, shared = tandem.Client(address), tandem.AsyncClient(address)
half = before.stream("ab", max_new_tokens=64)
if used:
    next(half)
if child := os.fork():
    status = os.waitpid(child, 0)[1]
    assert len(before.generate("ab", max_new_tokens=4).token_ids) == 4
    before.close()
    sys.exit(status)
signal.alarm(60)  # ends a child that hangs
after = tandem.Client(address)
asks = {
    "made before": lambda: before.generate("ab", max_new_tokens=4),
    "iterator": lambda: next(half),
    "made after": lambda: after.generate("ab", max_new_tokens=4),
    "asynchronous": lambda: asyncio.run(shared.generate("ab", max_new_tokens=4)),
}
for name, ask in asks.items():
    try:
        print(name, bool(ask()))
    except tandem.TandemError as error:
        print(name, error.code, error.reason, "spawn" in str(error), len(str(error).splitlines()))
before.close()
after.close()
os._exit(sys.stdout.flush() or 0)
"""
REFUSED = "FAILED_PRECONDITION FORKED True 1"


def test_a_forked_child_has_an_error_or_an_answer_at_once(tmp_path: Path) -> None:
    with server_process(tmp_path, "--role", "target") as server:
        address = server.wait_ready()
        for how, made_after in (("used", REFUSED), ("unused", "True")):
            command = (sys.executable, "-c", CHILD, address, how)
            done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=REPOSITORY, check=False)
            expected = {"made before": REFUSED, "iterator": REFUSED, "made after": made_after}
            lines = [f"{name} {outcome}" for name, outcome in expected.items()] + [f"asynchronous {made_after}"]
            assert (done.returncode, done.stdout.splitlines()) == (0, lines), done.stderr

"""vLLM's drafter at DraftWorker processes: rows that come, go, move and are preempted, waited for or not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.vllm import RemoteDrafter
from tests.support import GREEDY, HANG, ServerProcess, oracle
from tests.vllm.engine import LONGEST, Engine, drafter, prompts, scraped, until, worker

WAITS = pytest.mark.parametrize("budget_ms", [2000.0, 0.0], ids=["waits", "never waits"])


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with worker(tmp_path_factory.mktemp("worker")) as process:
        yield process


@WAITS
def test_rows_that_come_go_move_and_are_preempted_are_drafted_for_and_their_sessions_end(
    process: ServerProcess, budget_ms: float
) -> None:
    with contextlib.closing(drafter(process.wait_ready(), budget_ms=budget_ms)) as asked:
        # How many drafts come in time is up to the machine, if none is waited for: it gets more time until one does.
        pause, least = (0.004, 0.3) if budget_ms else (0.02, 0.0)
        engine, chance = Engine(asked, rows=6, pause=pause), random.Random(1)
        wanted = [engine.add(prompt, 30) for prompt in prompts(24)]
        cancelled = preempted = 0
        while engine.waiting or engine.batch:
            engine.step()
            if not (budget_ms or engine.accepted):
                engine.pause = min(2 * engine.pause, 1.0)
            at = chance.randrange(max(1, len(engine.batch)))
            if len(engine.seconds) % 9 == 8 and engine.batch:
                wanted.remove(engine.batch[at])
                engine.cancel(at)
                cancelled += 1
            elif len(engine.seconds) % 4 == 2 and engine.batch:
                engine.preempt(at)
                preempted += 1
        assert cancelled >= 3 and preempted > 5
        assert engine.accepted > least * sum(len(row.output) for row in wanted)
        for row in wanted:
            assert row.output == oracle(row.tokens[: row.prompt], GREEDY, len(row.output), past_the_end=True)
        assert asked.counts.get("errors") == 0
        assert asked.counts.get("accepted_tokens", "arrived") + asked.counts.get("accepted_tokens", "late") > 0
        until(lambda: scraped(process, "tandem:sessions{") == 0)


def test_a_worker_that_answers_in_time_drafts_every_token_but_those_of_the_target_itself(
    process: ServerProcess,
) -> None:
    before = scraped(process, "tandem:sessions_opened_total{")
    with contextlib.closing(drafter(process.wait_ready())) as asked:
        engine = Engine(asked, rows=4)
        for prompt in prompts(8):
            engine.add(prompt, 30)
        engine.run()
        # Of 30 tokens. The worker may copy some from the text, and a row goes undrafted while its session is opened,
        # for as many steps as that takes: no other row is held up by it.
        assert 0.7 * 8 * 23 < engine.accepted <= 8 * 23
        assert scraped(process, "tandem:sessions_opened_total{") == before + 8
        assert asked.counts.get("late_steps") == 0


BUDGETS = pytest.mark.parametrize("budget_ms", [200.0, 0.0], ids=["waits", "never waits"])
SLACK = 0.25
"""Seconds that a step may lose to other processes of a busy machine."""


def served(engine: Engine, count: int = 4) -> int:
    """Runs requests to their ends and checks their tokens; the drafts that were accepted."""
    before = engine.accepted
    rows = [engine.add(prompt, 30) for prompt in prompts(count, seed=engine.accepted)]
    engine.run()
    assert all(row.output == oracle(row.tokens[: row.prompt], GREEDY, 30, past_the_end=True)[:30] for row in rows)
    assert engine.drafter.counts.get("errors") == 0
    return engine.accepted - before


@pytest.mark.thorough
@BUDGETS
def test_a_worker_that_dies_leaves_rows_undrafted_until_it_is_back(tmp_path: Path, budget_ms: float) -> None:
    with worker(tmp_path) as process:
        address = process.wait_ready()
        with contextlib.closing(drafter(address, budget_ms=budget_ms, answer_seconds=1.0)) as asked:
            engine = Engine(asked, pause=0.01)
            assert served(engine)
            os.kill(process.process.pid, signal.SIGKILL)
            process.process.wait()
            served(engine)
            assert max(engine.seconds) < 0.2 + SLACK
            with worker(tmp_path, "--port", address.rpartition(":")[2], name="again.json") as again:
                again.wait_ready()
                until(lambda: served(engine) > 0)


def rows_that_never_end(asked: RemoteDrafter, steps: int, rows: int = 4) -> list[float]:
    """The seconds of the drafter's calls for rows that get a token a step."""
    ids, lengths, seconds = np.zeros((rows, LONGEST), np.int32), np.full(rows, 10), list[float]()
    chance = np.random.default_rng(0)
    ids[:, :10] = chance.integers(0, 256, (rows, 10))
    for _ in range(steps):
        if lengths[0] > LONGEST - 8:
            lengths[:] = 10
            ids[:, :10] = chance.integers(0, 256, (rows, 10))
        new = chance.integers(0, 256, rows)
        ids[np.arange(rows), lengths] = new
        lengths += 1
        began = time.monotonic()
        asked.propose([[int(token)] for token in new], lengths, ids, slot_mappings=None)
        seconds.append(time.monotonic() - began)
        time.sleep(0.002)
    return seconds


@pytest.mark.thorough
@BUDGETS
def test_no_step_takes_longer_than_the_budget_beside_a_worker_that_hangs(tmp_path: Path, budget_ms: float) -> None:
    gate = tmp_path / "gate"
    program = ("-m", "tests.services.hanging", str(gate))
    with worker(tmp_path, program=program) as process:
        address = process.wait_ready()
        with contextlib.closing(drafter(address, budget_ms=min(budget_ms, 30.0), answer_seconds=0.5)) as asked:
            engine = Engine(asked, pause=0.01)
            assert served(engine)
            gate.write_text("step")
            seconds = sorted(rows_that_never_end(asked, 1000))
            assert seconds[-1] < 0.03 + SLACK and seconds[-20] < 0.06, seconds[-20:]
            assert sum(seconds) < 30 * 0.03 * (budget_ms > 0) + 3, "a worker that hangs is soon not waited for"
            gate.unlink()
            until(lambda: served(engine) > 0)
        assert asked.counts.get("errors") == 0


@pytest.mark.thorough
def test_a_worker_that_is_slower_than_the_budget_is_used_without_waiting_for_it(tmp_path: Path) -> None:
    slow = worker(tmp_path, "--draft_model", "miss=0,step=0.02")
    with slow as process, contextlib.closing(drafter(process.wait_ready(), budget_ms=10.0, k=2)) as asked:
        engine = Engine(asked, rows=1, pause=0.06)
        assert served(engine, 2) > 10
        assert asked.counts.get("accepted_tokens", "late") > 10
        assert asked.counts.get("wait_seconds") < 0.010 * len(engine.seconds) / 2


@pytest.mark.parametrize("wrong", ["an exception inside", "rows without numbers"])
def test_a_mistake_of_the_drafter_itself_is_counted_and_the_engine_goes_on(wrong: str) -> None:
    with contextlib.closing(drafter("127.0.0.1:1", budget_ms=1.0)) as asked:
        nonsense: Any = ["x"] if wrong == "rows without numbers" else [7, 9]
        assert asked.propose([[1], [2]], nonsense, np.zeros((1, 8), np.int32)) == [[], []]
        assert asked.counts.get("errors") == 1


def test_an_address_where_nobody_answers_costs_no_more_than_the_budget() -> None:
    with contextlib.closing(drafter("127.0.0.1:1", budget_ms=50.0, answer_seconds=0.5)) as asked:
        engine = Engine(asked)
        served(engine)
        assert sorted(engine.seconds)[-3] < 0.05 + SLACK < HANG  # a busy machine may make two late

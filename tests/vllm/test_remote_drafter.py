"""vLLM's drafter at DraftWorker processes: rows that come, go, move and are preempted, waited for or not."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from tests.support import GREEDY, ServerProcess, oracle
from tests.vllm.engine import Engine, drafter, prompts
from tests.vllm.workers import scraped, until, worker

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
        # How many drafts come in time is up to the machine, if none is waited for.
        pause, least = (0.004, 0.3) if budget_ms else (0.02, 0.02)
        engine, chance = Engine(asked, rows=6, pause=pause), random.Random(1)
        wanted = [engine.add(prompt, 30) for prompt in prompts(24)]
        cancelled = preempted = 0
        while engine.waiting or engine.batch:
            engine.step()
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

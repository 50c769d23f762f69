"""A draft client whose verifier goes away goes on, there or elsewhere: the same tokens, none twice, none lost (G1, G5).

And where none answers any more: an error, in time, that carries the tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.rpc.errors import TandemError
from tandem.speculation.types import Chunk
from tandem.speculation.verification_mode import Pipeline
from tests.daily import daily
from tests.support import (
    SAMPLED,
    ServerProcess,
    distributed,
    ids,
    oracle,
    run,
    server_process,
    target_site,
    toy,
    worker_site,
)
from tests.toy import ToyConfig

PROMPT = list(b"abcabcabcab")
MODES, NAMES = (Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING), ("unary", "stream", "run")
LONG = ids(PROMPT, 90, sampling=SAMPLED, ignore_end_of_sequence=True)
TRUTH = oracle(PROMPT, SAMPLED, 90, past_the_end=True)


@contextlib.contextmanager
def started_again(server: ServerProcess, *arguments: str) -> Any:
    """The same role on the same port, once more, after kill -9."""
    server.process.wait()
    again = ServerProcess(
        server.folder, "--backend", "toy", "--port", str(server.port), *arguments, ready_file="again.json"
    )
    try:
        yield again
    finally:
        os.kill(again.process.pid, signal.SIGKILL)
        again.process.wait()


async def through(generator: Any, at: int, then: Any) -> tuple[int, ...]:
    """All tokens of LONG; `then()` is called once, after `at` of them."""
    seen: list[int] = []
    async with contextlib.aclosing(generator.generate(LONG)) as events:
        async for event in events:
            if isinstance(event, Chunk):
                seen += event.token_ids
                if then and len(seen) >= at:
                    then()
                    then = None
    return tuple(seen)


@pytest.mark.parametrize("pipeline", daily(MODES, 2), ids=["unary", "stream", "run"])
def test_a_verifier_killed_and_started_again_on_its_port_costs_no_token(tmp_path: Path, pipeline: Pipeline) -> None:
    """G1, G4: kill -9 in the middle; the session is rebuilt from its prefix."""
    role = ("--role", "target", "--model", "step=0.004")

    async def test(server: ServerProcess, stack: contextlib.ExitStack) -> None:
        def kill() -> None:
            os.kill(server.process.pid, signal.SIGKILL)
            stack.enter_context(started_again(server, *role))

        async with distributed(server.wait_ready(), "miss=0.3", pipeline=pipeline, reconnect_seconds=30) as (g, _):
            assert await through(g, 20, kill) == TRUTH

    with server_process(tmp_path, *role) as server, contextlib.ExitStack() as stack:
        run(test(server, stack))


@pytest.mark.parametrize("pipeline", daily(MODES, 0), ids=["unary", "stream", "run"])
def test_a_verifier_that_runs_another_model_does_not_take_over_and_the_reason_is_said(
    tmp_path: Path, pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """G8, and G1 above all: no token of another model."""

    async def test(first: ServerProcess) -> None:
        async with target_site(toy(ToyConfig(salt=1), max_length=512)) as other:
            address = first.wait_ready()
            async with distributed(
                f"{address},{other.address}", "miss=0.3", pipeline=pipeline, reconnect_seconds=1.0
            ) as (generator, client):
                client.pool.current = address
                info = await client.endpoints[address].info(5.0)
                client.expected, client.endpoints[other.address].suspect = info, True
                seen: list[int] = []
                with pytest.raises(TandemError, match="given up after") as caught:
                    async for event in generator.generate(LONG):
                        seen += getattr(event, "token_ids", ())
                        if first.process.poll() is None and len(seen) >= 20:
                            os.kill(first.process.pid, signal.SIGKILL)
                            first.process.wait()
                assert tuple(seen) == TRUTH[: len(seen)] and len(seen) >= 20
                assert caught.value.code == "UNAVAILABLE"
                assert caught.value.produced == tuple(seen)
            assert len(other.verifier.sessions) == 0 and other.engine.batcher.steps == 0

    with server_process(tmp_path, "--role", "target", "--model", "step=0.004") as first:
        run(test(first))
    assert "is not used: the TargetVerifier at" in caplog.text
    assert "weights_revision is 'toy:1', but this client started with 'toy:0'" in caplog.text


@pytest.mark.thorough  # daily: beside a verifier of another model, above
@pytest.mark.parametrize("pipeline", MODES, ids=["unary", "stream", "run"])
def test_while_none_answers_it_tries_again_and_then_ends_with_the_tokens_so_far(
    tmp_path: Path, pipeline: Pipeline
) -> None:
    """Through a DraftWorker too: its error's details carry them to the client."""

    async def test(server: ServerProcess) -> None:
        async with (
            worker_site(server.wait_ready(), "miss=0.3", reconnect_seconds=0.5) as worker,
            distributed(server.wait_ready(), "miss=0.3", pipeline=pipeline, reconnect_seconds=0.5) as (generator, _),
            worker.client() as client,
        ):
            seen: dict[str, list[int]] = {"loop": [], "service": []}

            async def ask(name: str, generate: Any) -> TandemError:
                with pytest.raises(TandemError, match=r"given up after \d+ attempts") as caught:
                    async for event in generate(LONG):
                        seen[name] += getattr(event, "token_ids", ())
                return caught.value

            asking = [
                asyncio.create_task(ask("loop", generator.generate)),
                asyncio.create_task(ask("service", client.generate)),
            ]
            while min(map(len, seen.values())) < 20:
                await asyncio.sleep(0.002)
            os.kill(server.process.pid, signal.SIGKILL)
            for name, error in zip(seen, await asyncio.gather(*asking), strict=True):
                assert error.code == "UNAVAILABLE"
                assert error.produced == tuple(seen[name]) == TRUTH[: len(seen[name])]

    with server_process(tmp_path, "--role", "target", "--model", "step=0.01") as server:
        run(test(server))

"""A replica of Ray Serve opens the port for OpenAI clients too. Its host is run here, without Ray."""

from __future__ import annotations

import asyncio
from functools import partial

import openai

from tandem.cli import configuration, main
from tandem.ports import free_port
from tandem.speculation.types import SamplingParams
from tandem.workshops.ray_serve.replica import TargetVerifier
from tests.support import oracle, run

PROMPT = tuple(b"hello")


class Here(TargetVerifier):
    """A replica that nothing but this test ends."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


def test_a_replica_answers_openai_clients_until_it_stops() -> None:
    async def test() -> None:
        door = free_port()
        args = main.parser().parse_args(["--role", "target", "--backend", "toy", "--http_port", str(door)])
        replica, ready = Here.__new__(Here), asyncio.Event()
        replica._stopping, replica._handlers, replica._layers = asyncio.Event(), {}, []
        running = asyncio.create_task(configuration.serve(args, partial(replica._host, ready)))
        await asyncio.wait({running, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert ready.is_set()
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{door}/v1", api_key="none") as client:
            answer = await client.completions.create(model="toy", prompt=list(PROMPT), max_tokens=12, temperature=0)
        assert answer.usage and answer.usage.completion_tokens == len(oracle(PROMPT, SamplingParams(), 12))
        replica._stopping.set()
        assert await running == 0

    run(test())

"""A replica of Ray Serve opens the ports of OpenAI clients and gateways too. Its host is run here, without Ray."""

from __future__ import annotations

import asyncio
from functools import partial

import openai
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from tandem.cli import configuration, main
from tandem.ports import free_port
from tandem.rpc.channel import open_channel
from tandem.speculation.types import SamplingParams
from tandem.workshops.ray_serve.replica import TargetVerifier
from tests.openai.site import PROMPT, asking
from tests.support import oracle, run


class Here(TargetVerifier):
    """A replica that nothing but this test ends."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


def test_a_replica_answers_gateways_until_it_stops() -> None:
    async def test() -> None:
        port, door = free_port(), free_port()
        ports = ["--engine_port", str(port), "--http_port", str(door)]
        args = main.parser().parse_args(["--role", "target", "--backend", "toy", *ports])
        replica, ready = Here.__new__(Here), asyncio.Event()
        replica._stopping, replica._handlers, replica._layers = asyncio.Event(), {}, []
        running = asyncio.create_task(configuration.serve(args, partial(replica._host, ready)))
        await asyncio.wait({running, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert ready.is_set()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(asking(temperature=0.0))
            (reply,) = [reply async for reply in call]
        assert tuple(reply.complete.output_ids) == oracle(PROMPT, SamplingParams(), 12)
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{door}/v1", api_key="none") as client:
            answer = await client.completions.create(model="toy", prompt=list(PROMPT), max_tokens=12, temperature=0)
        assert answer.usage and answer.usage.completion_tokens == len(reply.complete.output_ids)
        replica._stopping.set()
        assert await running == 0

    run(test())

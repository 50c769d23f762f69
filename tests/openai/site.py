"""The engine port of a toy server in this process, and its stub."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generators import fused_generator
from tandem.engine.loading import Loaded
from tandem.engine.model_config import DraftChoice
from tandem.engine.structures import Structures
from tandem.rpc.channel import open_channel
from tandem.runners.toy import VOCAB_SIZE, ToyConfig, ToyRunner, ToyTokenizer
from tandem.services.engine_port.service import EngineService
from tandem.services.generation import GenerateMethod
from tandem.services.lifecycle import Lifecycle
from tandem.services.load import ServerLoad
from tests.support import Interceptors, listening, toy

PROMPT = tuple(b"hello")


@dataclass
class EngineSite:
    stub: Any
    address: str
    engine: Engine
    runner: ToyRunner
    lifecycle: Lifecycle
    generate: GenerateMethod


@contextlib.asynccontextmanager
async def engine_site(
    config: ToyConfig | None = None,
    slots: int = 4,
    queue: int | None = None,
    drafts: bool = False,
    interceptors: Interceptors = (),
    kind: type[ToyRunner] = ToyRunner,
) -> AsyncIterator[EngineSite]:
    """A fused server's engine port; it drafts with a toy model if `drafts`, else by lookup."""
    batcher, lifecycle, runner = Batcher("test-engine"), Lifecycle(), toy(config, slots=slots, kind=kind)
    engine = Engine(runner, batcher, structures=Structures(ToyTokenizer(), VOCAB_SIZE))
    draft = Loaded(Engine(toy(config, slots=slots), batcher, vital=False), ToyTokenizer()) if drafts else None
    choice = DraftChoice("model" if drafts else "ngram")
    generator = fused_generator(Loaded(engine, ToyTokenizer()), draft, 3, choice)
    generate = GenerateMethod(generator, None, lifecycle, None, queue)
    service = EngineService(generate, ServerLoad(slots, lambda: generate.under_way, engine.slots))
    register = partial(vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, service)
    try:
        async with listening(register, interceptors=interceptors) as address, open_channel(address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            yield EngineSite(stub, address, engine, runner, lifecycle, generate)
    finally:
        await batcher.close()


def asking(count: int = 12, prompt: Sequence[int] = PROMPT, **fields: Any) -> pb.GenerateRequest:
    """A request as the gateway sends it. `stream` and `request_id` are its own, the rest are sampling parameters."""
    own = {name: fields.pop(name) for name in ("stream", "request_id") if name in fields}
    sampling = {"top_p": 1.0, "top_k": 2**32 - 1, "repetition_penalty": 1.0, "n": 1, "max_tokens": count, **fields}
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=pb.SamplingParams(**sampling), **own
    )


@dataclass
class Told:
    """What one choice was told."""

    chunks: list[Any] = field(default_factory=list)
    end: Any = None

    @property
    def tokens(self) -> tuple[int, ...]:
        streamed = tuple(token for chunk in self.chunks for token in chunk.token_ids)
        assert not (streamed and self.end.output_ids), "the end repeats what was streamed"
        return streamed or tuple(self.end.output_ids)

    @property
    def logprobs(self) -> tuple[tuple[int, float, dict[int, float]], ...]:
        """Of each token: id, log-probability, and those of the likeliest tokens."""
        each = [chunk.output_logprobs for chunk in self.chunks] or [self.end.output_logprobs]
        return tuple(
            (token, value, dict(zip(top.token_ids, top.values, strict=True)))
            for told in each
            for token, value, top in zip(told.token_ids, told.token_logprobs, told.top_logprobs, strict=True)
        )


async def told(site: EngineSite, request: pb.GenerateRequest) -> dict[int, Told]:
    """What each choice of a request was told, by index."""
    choices: dict[int, Told] = {}
    async for reply in site.stub.Generate(request):
        if reply.HasField("chunk"):
            choices.setdefault(reply.chunk.index, Told()).chunks.append(reply.chunk)
        else:
            choice = choices.setdefault(reply.complete.index, Told())
            assert choice.end is None
            choice.end = reply.complete
    return choices


async def one(site: EngineSite, request: pb.GenerateRequest) -> Told:
    (choice,) = (await told(site, request)).values()
    return choice

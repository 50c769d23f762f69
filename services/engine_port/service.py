"""VllmEngine service: what the gateway asks of a worker, answered by the generator of our own services."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime, timezone
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tandem.checkpoints.tokenizers import HasFiles, Tokenizer
from tandem.rpc.request_context import Request, begin, current_span, valid_id
from tandem.services.engine_port.aborting import Requests
from tandem.services.engine_port.conversion import Output, aborted_reply, chunk_reply, end_reply, requests_of
from tandem.services.errors import NotOffered
from tandem.services.generation import GenerateMethod, Generations
from tandem.services.load import ServerLoad
from tandem.speculation.types import GenerationEnd, GenerationRequest

ZIP_CHUNK = 512 * 1024  # bytes of a message of GetTokenizer


class EngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Requests pass the same admission, queue and limits as those of `generate`'s own service.

    `adapter`: the name of the one that all requests here have, which is then the model's name; empty: none.
    """

    def __init__(self, generate: GenerateMethod, load: ServerLoad, adapter: str = "") -> None:
        self._generate, self._load, self._requests, self._adapter = generate, load, Requests(), adapter
        self._started = time.monotonic()
        self._received = 0.0
        self._zipped: asyncio.Task[bytes] | None = None

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        self._received = time.time()
        generator = self._generate.generator
        metadata, longest = context.invocation_metadata() or (), generator.info.max_sequence_length
        requests = requests_of(request, self._generate.limits, longest, generator.defaults, self._adapter, metadata)
        if valid_id(request.request_id):
            begin(Request(request.request_id, current_span(), self._adapter))  # the id that the client was told
        choices = Generations(self._generate, requests, context.time_remaining())
        with self._requests.one(request.request_id, choices):
            async with contextlib.aclosing(_replies(choices, requests, request.stream)) as replies:
                async for reply in replies:
                    yield reply

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        self._requests.abort(request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        accepting = self._generate.lifecycle.accepting
        return pb.HealthCheckResponse(healthy=accepting, message="" if accepting else "the server is stopping")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        info = self._generate.generator.info
        return pb.GetModelInfoResponse(
            model_path=self._adapter or info.model_name,
            served_model_name=self._adapter or info.model_name,
            is_generation=True,
            max_context_length=info.max_sequence_length,
            max_req_input_len=info.max_sequence_length - 1,
            vocab_size=info.vocab_size,
            eos_token_ids=info.end_of_sequence_ids,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._load.running + self._load.waiting,
            is_paused=not self._generate.lifecycle.accepting,
            last_receive_timestamp=self._received,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            model_dtype=self._generate.generator.info.dtype,
            max_num_seqs=self._load.slots,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        load, length = self._load, self._generate.generator.info.max_sequence_length
        used = load.running / load.slots
        return pb.GetLoadsResponse(
            timestamp=datetime.now(timezone.utc).isoformat(),
            dp_rank_count=1,
            loads=[
                pb.SchedulerLoad(
                    num_running_reqs=load.running,
                    num_waiting_reqs=load.waiting,
                    num_total_reqs=load.running + load.waiting,
                    num_used_tokens=load.running * length,  # a slot is reserved whole
                    max_total_num_tokens=load.slots * length,
                    token_usage=used,
                    utilization=used,
                    gen_throughput=float(self._generate.produced),
                    max_running_requests=load.slots,
                )
            ],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        """Streams a zip of the tokenizer's files, so that the gateway needs neither a path nor a hub."""
        if self._zipped is None or (self._zipped.done() and self._zipped.exception()):
            zipping = asyncio.to_thread(_zipped, self._generate.generator.tokenizer)
            self._zipped = asyncio.create_task(zipping, name="tokenizer files")
        data = await asyncio.shield(self._zipped)
        for start in range(0, len(data), ZIP_CHUNK):
            yield common_pb2.GetTokenizerChunk(data=data[start : start + ZIP_CHUNK])
        yield common_pb2.GetTokenizerChunk(sha256=hashlib.sha256(data).hexdigest())

    async def Embed(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise NotOffered("embeddings are not served")

    async def FlushCache(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise NotOffered("the prefix cache is not flushed; it is bounded by --prefix_cache_mb")

    async def StartProfile(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise NotOffered("profiling is not served")

    async def StopProfile(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise NotOffered("profiling is not served")

    async def SubscribeKvEvents(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        raise NotOffered("KV cache events are not served")
        yield


async def _replies(
    choices: Generations, requests: list[GenerationRequest], stream: bool
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """Yields the replies to a request. Each choice ends with a reply of its own, also if the request is aborted."""
    outputs = [Output() for _ in requests]
    prompt = len(requests[0].token_ids or ())  # of a text: said at the end
    ends: dict[int, pb.GenerateResponse] = {}
    async with contextlib.aclosing(choices.events()) as events:
        async for choice, event in events:
            if isinstance(event, GenerationEnd):
                ends[choice] = end_reply(event, requests[choice], choice, outputs[choice], stream)
                if stream:
                    yield ends[choice]
                continue
            outputs[choice].add(event)
            if stream:
                yield chunk_reply(event, choice, prompt, len(outputs[choice].token_ids))
    for choice in range(len(requests)):
        if choice not in ends:
            yield aborted_reply(choice, prompt, outputs[choice], stream)
        elif not stream:  # in order, since the gateway numbers them as they come
            yield ends[choice]


def _zipped(tokenizer: Tokenizer) -> bytes:
    """Returns a zip of the tokenizer's files, the same for the same files. Raises NotOffered if it has none."""
    if not isinstance(tokenizer, HasFiles):
        raise NotOffered("this server's tokenizer has no files")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(tokenizer.files().items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()

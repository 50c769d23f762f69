"""Asks the gateway's workers how many requests they run at once, and how many run now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from tandem.rpc.reach import obstacle

ANSWER_SECONDS = 5.0


async def slots_of(workers: Sequence[str]) -> int:
    """Returns the KV slots of all workers together; 0 while none answers. A silent one counts like the largest."""
    known = await asyncio.gather(*(_slots(worker) for worker in workers))
    return sum(slots or max(known) for slots in known)


async def running_at(workers: Sequence[str]) -> int:
    """Returns how many requests run or wait at all workers together, of those that answer within a second."""
    return sum(await asyncio.gather(*(_running(worker) for worker in workers)))


async def trouble_of(worker: str) -> str:
    """Returns why a worker's slots are not known, and what to do."""
    found = await obstacle(worker, None)
    if found is None or found.reason == "HTTP_PORT":
        what = "an HTTP port" if found else "no engine port"
        return f"{worker} is {what}: name the one that its server has by --engine_port"
    return found.message


async def _running(worker: str) -> int:
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    async with grpc.aio.insecure_channel(worker) as channel:
        try:
            loads = await vllm_engine_pb2_grpc.VllmEngineStub(channel).GetLoads(pb.GetLoadsRequest(), timeout=1.0)
        except grpc.aio.AioRpcError:
            return 0
        return sum(each.num_total_reqs for each in loads.loads)


async def _slots(worker: str) -> int:
    """Returns a worker's KV slots; 0 if it does not answer."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    async with grpc.aio.insecure_channel(worker) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        try:
            return int((await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=ANSWER_SECONDS)).max_num_seqs)
        except grpc.aio.AioRpcError:
            return 0

"""Tandem on Ray Serve, for real: a cluster of two nodes on this machine, the toy runner, clients that know no Ray."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from tandem.launch import free_port
from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.credentials import Credentials
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import TandemError
from tandem.speculation.types import GenerationEnd
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tandem.workshops.ray_serve.application import run, start
from tests.support import GREEDY, REPOSITORY, SAMPLED, answer, distributed, ids, oracle, raw_stub

ray = pytest.importorskip("ray", reason="ray is absent: pip install '.[ray]'")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]  # a cluster comes up in 15 s if idle, else in up to 280

SLOTS, LENGTH, CORES = 24, 2000, 4
DRAFTED = ("--draft_model", "miss=0.3")
TOY = ("--backend", "toy", "--batch", str(SLOTS), "--sequence_length", str(LENGTH), "--drain_seconds", "1")


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the token that the fused server asks for; beside it, the file that lists it."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "accepted").write_text(f"somebody {'t' * 40}\n")
    (folder / "own").write_text("t" * 40)
    for file in folder.iterdir():
        file.chmod(0o600)
    return folder / "own"


@pytest.fixture(scope="module")
def ingress(token: Path) -> Iterator[str]:
    """host:port of Serve's gRPC proxy to two TargetVerifiers and one of each other server; fused needs a token."""
    from ray import serve
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(REPOSITORY))
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    node = {"num_cpus": 4, "resources": {"neuron_cores": CORES}, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
        port = free_port()
        start(port, http_port=free_port(), location="HeadOnly")  # both nodes are this machine
        run(("--role", "target", *TOY), CORES - 1, 0.5, (2, 2))
        run(("--role", "fused_target", "--accept_tokens", str(token.parent / "accepted"), *DRAFTED, *TOY), 1, 0.5)
        run(("--role", "draft_worker", "--target_host", f"127.0.0.1:{port}", *DRAFTED, *TOY), cpus=0.5)
        yield f"127.0.0.1:{port}"
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cluster.shutdown()
        patch.undo()


def shown(service: str, token: Path) -> Credentials:
    return Credentials(token_file=str(token) if service == FUSED else None)


def replicas(service: str) -> list[Any]:
    """The actors that run as a service's replicas."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["name"].startswith(f"SERVE_REPLICA::{service}#")]
    return [ray.get_actor(name, namespace="serve") for name in names]


def kill(service: str, busy: bool) -> None:
    """Kills a service's replicas, all or the one with a call under way, as a machine that is gone would."""
    every = replicas(service)
    chosen = [actor for actor in every if not busy or ray.get(actor.get_num_ongoing_requests.remote())]
    assert len(chosen) == (1 if busy else len(every))
    for actor in chosen:
        ray.kill(actor)


@pytest.mark.parametrize("service", [TARGET, FUSED, DRAFT])
async def test_every_service_generates_the_targets_tokens(ingress: str, token: Path, service: str) -> None:
    async with GenerationClient.connect(ingress, service, shown(service, token)) as client:
        info = await client.model_info()
        assert (info.kv_slots, info.max_sequence_length) == (SLOTS, LENGTH)
        for sampling in (GREEDY, SAMPLED):
            said = await answer(client.generate, ids(b"hello", 40, sampling=sampling))
            assert said.token_ids == oracle(b"hello", sampling, 40)
        stats = said.completion.stats  # by measurement, a target may not wait for drafts: all come late then
        assert (stats.drafted + stats.stale_drafts > 0) == (service != TARGET)


def test_replicas_reserve_their_neuron_cores_on_both_nodes(ingress: str) -> None:
    left = [node.get("neuron_cores", 0) for node in ray._private.state.available_resources_per_node().values()]
    assert sorted(left) == [0, 1]  # 3 + 1 of 4 on one node, 3 of 4 on the other


async def test_sessions_are_spread_and_each_stays_on_its_replica_by_calls_and_by_stream(ingress: str) -> None:
    """Rounds of 24 sessions in turn, none opened again: one that went astray would be NOT_FOUND."""
    tokens = {f"sticky-{i}": [i + 1] for i in range(SLOTS)}
    async with raw_stub(ingress) as stub:

        def due(name: str) -> pb.VerifyRequest:
            return pb.VerifyRequest(session_id=name, base_length=len(tokens[name]), last_token=tokens[name][-1])

        for name, prefix in tokens.items():
            await stub.OpenSession(pb.OpenSessionRequest(session_id=name, prefix=prefix, prompt_length=1))
        for name in [*tokens, *tokens, *tokens]:
            tokens[name] += (await stub.Verify(due(name))).token_ids
        streams = {name: stub.VerifyStream() for name in tokens}
        for name, stream in streams.items():
            await stream.write(due(name))
            tokens[name] += (await stream.read()).token_ids
        held = [ray.get(actor.get_num_ongoing_requests.remote()) for actor in replicas(TARGET)]
        assert sum(held) == SLOTS and min(held) > 0
        for name, stream in streams.items():
            stream.cancel()
            assert (await stub.CloseSession(pb.CloseSessionRequest(session_id=name))).closed
    assert list(tokens.values()) == [[i + 1, *oracle([i + 1], GREEDY, 4, past_the_end=True)] for i in range(SLOTS)]


async def test_a_replica_asks_for_a_token_as_a_server_does(ingress: str) -> None:
    async with GenerationClient.connect(ingress, FUSED) as client:
        with pytest.raises(TandemError, match="UNAUTHENTICATED"):
            await answer(client.generate, ids(b"hello"))


async def test_another_host_is_refused(ingress: str) -> None:
    """Calls the port by an address of this machine that is not loopback, which the proxy takes for another host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses the address it would be sent from
        except OSError:
            pytest.skip("this machine has no address but loopback's")
        address = probe.getsockname()[0]
    async with GenerationClient.connect(f"{address}:{ingress.rpartition(':')[2]}", TARGET) as client:
        with pytest.raises(TandemError, match=r"PERMISSION_DENIED: .*proxy with TLS"):
            await answer(client.generate, ids(b"hello"))


async def test_a_failure_of_ours_arrives_with_its_details(ingress: str) -> None:
    lost = pb.VerifyRequest(session_id="never opened", base_length=1, last_token=1)
    async with raw_stub(ingress) as stub:
        for call in (stub.Verify(lost), anext(aiter(stub.VerifyStream(iter([lost]))))):
            with pytest.raises(grpc.aio.AioRpcError, match="no session never opened") as failed:
                await call
            assert failed.value.code() is grpc.StatusCode.NOT_FOUND
            assert rpc_status.from_call(failed.value).details[0].type_url.endswith("ErrorInfo")


@pytest.mark.parametrize("pipeline", [Pipeline.ON, Pipeline.OFF])
async def test_a_client_goes_on_where_its_replica_was_killed_mid_request(ingress: str, pipeline: Pipeline) -> None:
    tokens: list[int] = []
    async with distributed(ingress, pipeline=pipeline, max_length=400) as (generator, _):
        async for event in generator.generate(ids(b"hello", 300, ignore_end_of_sequence=True)):
            if isinstance(event, GenerationEnd):
                break
            if len(tokens) < 100 <= len(tokens) + len(event.token_ids):
                kill(TARGET, busy=pipeline is Pipeline.ON)  # a session of calls is nowhere between them: all
            tokens += event.token_ids
    assert tuple(tokens) == oracle(b"hello", GREEDY, 300, past_the_end=True)


async def test_a_killed_replica_is_unavailable_to_who_waits_for_it_and_the_next_says_the_same(
    ingress: str, token: Path
) -> None:
    async with GenerationClient.connect(ingress, FUSED, shown(FUSED, token)) as client:
        events = client.generate(ids(b"hello", LENGTH - 20, ignore_end_of_sequence=True))
        await anext(events)
        kill(FUSED, busy=True)
        with pytest.raises(TandemError, match="UNAVAILABLE"):
            async for _ in events:
                pass
        assert (await answer(client.generate, ids(b"hello", 40))).token_ids == oracle(b"hello", GREEDY, 40)

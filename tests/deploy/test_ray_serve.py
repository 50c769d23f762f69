"""Tandem on Ray Serve, for real: a cluster of two nodes on this machine, the toy runner, clients that know no Ray."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from clients.channel import DRAFT, FUSED, TARGET
from clients.errors import TandemError
from clients.generation import GenerationClient
from deploy.ray_ingress import STATUS_DETAILS, RoutedContext
from deploy.ray_serve import RayConfig, application, main, run, start
from speculation.depth import Pipeline
from speculation.types import Completion
from tandem.v1 import target_verifier_pb2 as pb
from tests.support import GREEDY, REPOSITORY, SAMPLED, answer, distributed, ids, oracle, raw_stub
from tests.support import run as run_async

ray = pytest.importorskip("ray", reason="ray is absent: pip install -e .[ray]")

SLOTS, LENGTH, CORES = 24, 2000, 4
TOY = (
    "--backend",
    "toy",
    "--draft_model",
    "miss=0.3",
    "--batch",
    str(SLOTS),
    "--sequence_length",
    str(LENGTH),
    "--drain_seconds",
    "1",
)


@pytest.fixture(scope="module")
def ingress() -> Iterator[str]:
    """host:port of Serve's gRPC proxy: two TargetVerifiers, one to a node, and one of each of the others."""
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
        start(port, http_port=free_port(), everywhere=False)  # both nodes are this machine
        run(RayConfig(neuron_cores=CORES - 1, cpus=0.5, min_replicas=2, max_replicas=2), ("--role", "target", *TOY))
        run(RayConfig(neuron_cores=1, cpus=0.5), ("--role", "fused_target", *TOY))
        run(RayConfig(cpus=0.5), ("--role", "draft_worker", "--target_host", f"127.0.0.1:{port}", *TOY))
        yield f"127.0.0.1:{port}"
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cluster.shutdown()
        patch.undo()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
def test_every_service_generates_the_targets_tokens(ingress, service):
    async def test() -> None:
        async with GenerationClient.connect(ingress, service) as client:
            info = await client.model_info()
            assert (info.kv_slots, info.max_sequence_length) == (SLOTS, LENGTH)
            for sampling in (GREEDY, SAMPLED):
                said = await answer(client.generate, ids(b"hello", 40, sampling=sampling))
                assert said.token_ids == oracle(b"hello", sampling, 40)
            assert (said.completion.stats.accepted > 0) == (service != TARGET)

    run_async(test())


def test_replicas_reserve_their_neuron_cores_on_both_nodes(ingress):
    left = [node.get("neuron_cores", 0) for node in ray._private.state.available_resources_per_node().values()]
    assert sorted(left) == [0, 1]  # 3 + 1 of 4 on one node, 3 of 4 on the other


@pytest.mark.parametrize("pipeline", [Pipeline.OFF, Pipeline.ON])
def test_a_session_stays_on_its_replica_by_calls_and_by_stream(ingress, pipeline):
    async def test() -> None:
        async with distributed(ingress, pipeline=pipeline) as (generator, client):
            said = await asyncio.gather(*(answer(generator.generate, ids(p, 40)) for p in (b"a", b"b", b"c", b"d")))
            assert [each.token_ids for each in said] == [oracle(p, GREEDY, 40) for p in (b"a", b"b", b"c", b"d")]
            assert client.streams is (True if pipeline is Pipeline.ON else None)

    run_async(test())


def test_a_failure_of_ours_arrives_with_its_details(ingress):
    async def test() -> None:
        lost = pb.VerifyRequest(session_id="never opened", base_length=1, last_token=1)
        async with raw_stub(ingress) as stub:
            for call in (stub.Verify(lost), anext(aiter(stub.VerifyStream(iter([lost]))))):
                with pytest.raises(grpc.aio.AioRpcError, match="no session never opened") as failed:
                    await call
                assert failed.value.code() is grpc.StatusCode.NOT_FOUND
                assert rpc_status.from_call(failed.value).details[0].type_url.endswith("ErrorInfo")

    run_async(test())


@pytest.mark.parametrize("pipeline", [Pipeline.ON, Pipeline.OFF])
def test_a_client_goes_on_where_its_replica_was_killed_mid_request(ingress, pipeline):
    async def test() -> None:
        tokens: list[int] = []
        async with distributed(ingress, pipeline=pipeline, max_length=400) as (generator, _):
            async for event in generator.generate(ids(b"hello", 300, ignore_end_of_sequence=True)):
                if isinstance(event, Completion):
                    break
                if len(tokens) < 100 <= len(tokens) + len(event.token_ids):
                    kill(TARGET, busy=pipeline is Pipeline.ON)  # a session of calls is nowhere between them: all
                tokens += event.token_ids
        assert tuple(tokens) == oracle(b"hello", GREEDY, 300, past_the_end=True)

    run_async(test())


def test_a_draft_worker_in_the_cluster_goes_on_where_its_target_was_killed(ingress):
    async def test() -> None:
        tokens: list[int] = []
        async with GenerationClient.connect(ingress, DRAFT) as client:
            async for event in client.generate(ids(b"hello", LENGTH - 20, ignore_end_of_sequence=True)):
                if isinstance(event, Completion):
                    break
                if not tokens:
                    kill(TARGET, busy=True)
                tokens += event.token_ids
        assert tuple(tokens) == oracle(b"hello", GREEDY, LENGTH - 20, past_the_end=True)

    run_async(test())


def test_a_killed_replica_is_unavailable_to_who_waits_for_it_and_the_next_says_the_same(ingress):
    async def test() -> None:
        async with GenerationClient.connect(ingress, FUSED) as client:
            events = client.generate(ids(b"hello", LENGTH - 20, ignore_end_of_sequence=True))
            await anext(events)
            kill(FUSED, busy=True)
            with pytest.raises(TandemError, match="UNAVAILABLE"):
                async for _ in events:
                    pass
            assert (await answer(client.generate, ids(b"hello", 40))).token_ids == oracle(b"hello", GREEDY, 40)

    run_async(test())


class Context:
    """A call's context at the proxy."""

    def __init__(self, code: grpc.StatusCode, trailing: tuple[tuple[str, bytes], ...] = ()) -> None:
        self._code, self._trailing = code, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._trailing

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", "Bearer x"),)


def test_only_a_failure_of_rays_own_is_unavailable():
    ours = Context(grpc.StatusCode.INTERNAL, ((STATUS_DETAILS, b"..."),))
    rays = Context(grpc.StatusCode.INTERNAL)
    for context in (ours, rays):
        RoutedContext(context, TARGET, "").settle()
    assert (ours.code(), rays.code()) == (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)


def test_a_call_is_routed_by_its_service_and_session():
    routed = RoutedContext(Context(grpc.StatusCode.OK), TARGET, "s")
    said = (("authorization", "Bearer x"), ("application", TARGET), ("session_id", "s"))
    assert routed.invocation_metadata() == said
    assert RoutedContext(Context(grpc.StatusCode.OK), DRAFT, "").invocation_metadata() == (
        said[0],
        ("application", DRAFT),
    )


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"neuron_cores": -1}, "neuron_cores: -1"),
        ({"cpus": -0.5}, "cpus: -0.5"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas: 3 is outside 1 to max_replicas 2"),
        ({"busy_slots": 0}, "busy_slots: 0 is outside"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, field):
    with pytest.raises(ValueError, match=field):
        RayConfig(**settings)


def test_only_server_roles_can_be_deployed():
    with pytest.raises(ValueError, match="role: client is not one of target, fused_target, draft_worker"):
        application(RayConfig(), ("--role", "client"))


def test_a_deployment_that_cannot_start_says_why_in_one_line(capsys):
    assert main(["--min_replicas", "0", "--", "--role", "target"]) == 2
    assert capsys.readouterr().err == "deploy.ray_serve: min_replicas: 0 is outside 1 to max_replicas 1\n"


def test_the_import_name_proto_stays_that_of_proto_plus():
    """Ray's dependencies import it; our folder of that name holds text, and stands first on the path."""
    program = "import proto, google.api_core.rest_streaming; print(proto.Message.__name__, proto.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("Message ") and "site-packages" in shown.stdout

"""OpenAI's `model` names an adapter: each is a worker of its own for the gateway, on a port of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from tandem.rpc.channel import open_channel
from tests.openai.gateway import COMPLETIONS, gateway
from tests.support import GREEDY, HANG, oracle, run, server_process

ADAPTERS = ("--adapters", "red=of-red,blue=of-blue")
PROMPT = "what adapters say"


def expected(adapter: str, count: int = 12) -> str:
    said = oracle(PROMPT.encode(), GREEDY, count, past_the_end=True, adapter=adapter)
    return bytes(token for token in said if token < 256).decode("utf-8", "replace")


def three_free_ports() -> int:
    """The first of three neighbours that are free now."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            bound = [stack.enter_context(socket.socket()) for _ in range(3)]
            bound[0].bind(("127.0.0.1", 0))
            first = int(bound[0].getsockname()[1])
            for offset in (1, 2):
                bound[offset].bind(("127.0.0.1", first + offset))
            return first


@pytest.mark.thorough
def test_a_model_of_the_gateway_is_the_target_or_one_of_its_adapters(tmp_path: Path) -> None:
    with server_process(tmp_path, "--role", "target", "--engine_port", "0", *ADAPTERS) as server:
        ready = json.loads(server.ready_file.read_text())
        ports = (ready["engine_port"], *ready["adapter_ports"].values())
        _check(tmp_path, ",".join(f"127.0.0.1:{port}" for port in ports))


def _check(folder: Path, workers: str) -> None:
    with gateway(folder, "--workers", workers) as gate:
        give_up = time.monotonic() + HANG
        while gate.send(COMPLETIONS, {"model": "blue", "prompt": PROMPT, "max_tokens": 1}).status == 404:
            assert time.monotonic() < give_up
        for _ in range(2):
            for model, adapter in (("toy", ""), ("red", "of-red"), ("blue", "of-blue")):
                fields = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
                reply = gate.send(COMPLETIONS, fields)
                assert reply.status == 200, reply.body
                assert reply.text.rstrip("\ufffd") == expected(adapter).rstrip("\ufffd")
        assert gate.send(COMPLETIONS, {"model": "green", "prompt": PROMPT}).status == 404


def test_a_server_has_a_port_for_each_adapter_and_names_it_by_it(tmp_path: Path) -> None:
    async def model_at(port: int) -> str:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            reply = await vllm_engine_pb2_grpc.VllmEngineStub(channel).GetModelInfo(pb.GetModelInfoRequest())
            return str(reply.served_model_name)

    for port in (0, three_free_ports()):
        with server_process(tmp_path, "--role", "target", "--engine_port", str(port), *ADAPTERS) as server:
            ready = json.loads(server.ready_file.read_text())
            assert list(ready["adapter_ports"]) == ["red", "blue"]
            for name, number in {"toy": ready["engine_port"], **ready["adapter_ports"]}.items():
                assert run(model_at(number)) == name
            if port:
                assert ready["adapter_ports"] == {"red": port + 1, "blue": port + 2}
        server.ready_file.unlink()

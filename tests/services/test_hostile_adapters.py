"""Adapters made to do harm, added to a running server: each is refused by name while the server serves as before."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server
from transformers import LlamaForCausalLM

from tandem.checkpoints.adapter_files import read_adapter
from tandem.rpc.channel import TARGET, open_channel
from tandem.rpc.generation_client import GenerationClient
from tandem.services.adapter_admin import AdapterAdminConfig, AdapterAdminService
from tandem.services.health import SERVING, HealthService
from tandem.speculation.types import Chunk, GenerationRequest
from tandem.v1 import adapter_admin_pb2 as pb
from tandem.v1.adapter_admin_pb2_grpc import AdapterAdminStub, add_AdapterAdminServicer_to_server
from tests.adapters import lora_tensors, write_adapter
from tests.runners.tiny import model_folder
from tests.support import GREEDY, HANG, listening, run, server_process, target_site


def hostile(root: Path, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Writes folders below `root`; yields their names and what the refusal says."""

    def written(name: str, said: str, times: float = 1.0, **fields: Any) -> tuple[str, str]:
        write_adapter(root / name, {key: value * times for key, value in tensors.items()}, **fields)
        return name, said

    def configured(name: str, said: str, content: str) -> tuple[str, str]:
        written(name, said)
        (root / name / "adapter_config.json").write_text(content)
        return name, said

    yield written("backtracking", "has rank 4, and adapter_config.json says 8", r=8, rank_pattern={"(.+)+x": 4})
    yield written("nested", "rank_pattern: its patterns take more than", rank_pattern={"((.?){9999}){9999}q_proj": 4})
    yield written("look-around", "alpha_pattern: '(?=.*)q_proj'", alpha_pattern={"(?=.*)q_proj": 4})
    yield written("alpha", "would overflow: its factor", lora_alpha=1e39)
    yield written("weights", "would overflow: its factor", times=1e30)
    yield configured("digits", "a number has 400 digits", '{"peft_type": "LORA", "r": ' + "1" * 400 + "}")
    yield configured("deep", "nested more than 64 deep", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    yield configured("not-a-number", "is nan, not a finite number", '{"peft_type": "LORA", "lora_alpha": NaN}')
    yield written("pipe", "not a regular file")
    (root / "pipe" / "adapter_config.json").unlink()
    os.mkfifo(root / "pipe" / "adapter_config.json")
    yield written("cut", "cannot be read")
    weights = root / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    yield written("header", "cannot be read")
    (root / "header" / "adapter_model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")


async def check_refusals(admin: AdapterAdminStub, health: HealthStub, refusals: Sequence[tuple[str, str]]) -> None:
    for name, why in refusals:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await added(admin, health, name)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value
        assert why in str(refused.value.details()), refused.value
    assert not (await admin.ListAdapters(pb.ListAdaptersRequest())).adapters


async def added(admin: AdapterAdminStub, health: HealthStub, name: str) -> None:
    """Adds an adapter while health is asked without a pause."""
    call = admin.AddAdapter(pb.AddAdapterRequest(name="it", folder=name), timeout=HANG)
    while not call.done():
        status = await health.Check(health_pb2.HealthCheckRequest(), timeout=HANG)
        assert status.status == health_pb2.HealthCheckResponse.SERVING
    await call


def test_adapters_made_to_do_harm_are_refused_by_name_while_health_answers(tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{key}A.weight": torch.ones(4, 6), f"{key}B.weight": torch.ones(8, 4)}
    write_adapter(tmp_path / "good", tensors)
    refusals = list(hostile(tmp_path, tensors))

    async def test() -> None:
        health = HealthService()
        health.set(SERVING, "")
        async with target_site() as site:
            assert site.engine
            service = AdapterAdminService(site.engine.adapters, read_adapter, AdapterAdminConfig(tmp_path))

            def register(server: grpc.aio.Server) -> None:
                add_AdapterAdminServicer_to_server(service, server)
                add_HealthServicer_to_server(health, server)

            async with listening(register) as address, open_channel(address) as channel:
                admin, stub = AdapterAdminStub(channel), HealthStub(channel)
                await check_refusals(admin, stub, refusals)
                await added(admin, stub, "good")

    run(test())


@pytest.mark.thorough
def test_a_native_server_survives_them_and_says_what_it_said_before(tmp_path: Path) -> None:
    model, root = model_folder(tmp_path / "model", 1), tmp_path / "adapters"
    tensors = lora_tensors(LlamaForCausalLM.from_pretrained(model), 1)
    write_adapter(root / "good", tensors)
    refusals = list(hostile(root, tensors))

    async def said(channel: grpc.aio.Channel, adapter: str = "") -> list[int]:
        wish: dict[str, Any] = {"max_new_tokens": 12, "ignore_end_of_sequence": True, "adapter": adapter}
        asked = GenerationRequest(token_ids=(2, 3, 4), sampling=GREEDY, **wish)
        events = [event async for event in GenerationClient(channel, TARGET).generate(asked)]
        return [token for event in events if isinstance(event, Chunk) for token in event.token_ids]

    async def test(address: str) -> None:
        async with open_channel(address) as channel:
            admin, health = AdapterAdminStub(channel), HealthStub(channel)
            before = await said(channel)
            await check_refusals(admin, health, refusals)
            await added(admin, health, "good")
            assert await said(channel) == before != await said(channel, "it")

    flags = ("--role", "target", "--backend", "torch", "--model", str(model), "--adapter_root", str(root))
    with server_process(tmp_path, *flags) as server:
        run(test(server.wait_ready()))
        assert "native" in server.log.read_text()
        assert server.stop() == 0

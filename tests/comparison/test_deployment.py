"""Which servers are started, with what, and which are only connected to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.locate import EMBEDDED_HEAD
from tandem.cli.command_line import RoleParser
from tandem.comparison.measuring.architectures import COMPARED
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint, baseline_of, deploy
from tandem.launch import LAUNCH
from tandem.rpc.credentials import Credentials
from tandem.speculation.types import ModelInfo
from tandem.workshops.planning.host_placement import CoreGroup, HostPlacement
from tests.comparison.fakes import MODEL, prompt


@dataclass
class Started:
    address: str
    log: Path


@dataclass
class FakeFleet:
    commands: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    async def start(self, name: str, command: list[str]) -> Started:
        self.commands[name] = command
        address = f"127.0.0.1:{5000 + len(self.commands)}"
        self.names[address] = name
        return Started(address, Path(f"{name}.log"))


def deployed(
    turn: tuple[str, ...] | None = None, plain_width: int = 1, **settings: Any
) -> tuple[dict[str, list[str]], list[Endpoint]]:
    config = ComparisonConfig(prompts=(prompt("one"),), output_dir=Path("unused"), **settings)
    fleet = FakeFleet()

    async def describe(address: str, service: str) -> ModelInfo:
        return (
            MODEL if fleet.names.get(address) == "autoregressive_width_1" else replace(MODEL, plain_width=plain_width)
        )

    endpoints = asyncio.run(deploy(config, fleet, describe, turn=turn))
    return fleet.commands, endpoints


def names(endpoints: list[Endpoint]) -> list[str]:
    return [endpoint.architecture.name for endpoint in endpoints]


DEFAULTS = ["autoregressive", "lookup", "distributed", "never_waiting", "fused", "remote_draft"]


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_six_servers_are_started_for_six_architectures() -> None:
    commands, endpoints = deployed()
    assert {name: value(command, "--role") for name, command in commands.items()} == {
        "autoregressive": "target",
        "lookup": "fused_target",
        "fused": "fused_target",
        "distributed": "draft_worker",
        "never_waiting": "draft_worker",
        "remote_draft": "target",
    }
    assert names(endpoints) == DEFAULTS
    assert [endpoint.architecture.split for endpoint in endpoints] == [False, False, True, True, False, True]
    worker = next(endpoint for endpoint in endpoints if endpoint.architecture.name == "distributed")
    assert value(commands["remote_draft"], "--draft_host") == worker.address
    assert "--propose_only" not in commands["distributed"]
    baseline = baseline_of(endpoints)
    assert baseline is not None and baseline.architecture.name == "autoregressive"


def test_every_server_flag_reaches_every_server() -> None:
    settings = {"dtype": "bfloat16", "weights": "int8", "threads": 2, "batch": 3}
    commands, _ = deployed(model="TARGET", draft_model="DRAFT", draft="model", speculation_length=7, **settings)
    for command in commands.values():
        assert {name: value(command, f"--{name}") for name in settings} == {k: str(v) for k, v in settings.items()}
        assert value(command, "--max_speculation_length") == "7"
        assert (value(command, "--sequence_length"), value(command, "--port")) == ("512", "0")
    for name in ("autoregressive", "remote_draft"):
        assert value(commands[name], "--model") == "TARGET"
    for name in ("fused", "distributed"):
        drafting = [value(commands[name], flag) for flag in ("--target_model", "--draft_model", "--draft")]
        assert drafting == ["TARGET", "DRAFT", "model"]


PLACED = HostPlacement(CoreGroup("0-7", 8), CoreGroup("0-3", 4), CoreGroup("7"))


def turn(*names: str, **settings: Any) -> dict[str, list[str]]:
    return deployed(turn=names, placement=PLACED, **settings)[0]


def placed(command: list[str]) -> tuple[str, str]:
    return value(command, "--cores"), value(command, "--tp_degree") if "--tp_degree" in command else "1"


def test_placed_servers_have_the_same_cores_in_every_architecture() -> None:
    neuron = {"device": "neuron", "compiled_dir": "/neff", "model": "T", "draft_model": "D"}
    plain, fused = turn("autoregressive", **neuron), turn("fused", **neuron)
    assert placed(plain["autoregressive"]) == placed(fused["fused"]) == ("0-7", "8")
    apart = turn("distributed", **neuron)
    assert placed(apart["autoregressive"]) == ("0-3", "4") and placed(apart["distributed"]) == ("7", "1")
    driving = turn("remote_draft", **neuron)
    assert placed(driving["remote_draft"]) == ("0-3", "4") and placed(driving["draft_worker"]) == ("7", "1")
    for command in (*plain.values(), *fused.values(), *apart.values(), *driving.values()):
        assert value(command, "--device") == "neuron" and value(command, "--compiled_dir") == "/neff"
        assert value(command, "--max_speculation_length") == "3", "a longer one would make every round as long"
        assert RoleParser().parse_args(command[len(LAUNCH) :])


def test_nxdi_servers_are_given_their_configuration() -> None:
    config = {"backend": "nxdi", "neuron_config": '{"fused_qkv": true}', "draft_neuron_config": '{"quantized": false}'}
    fused, plain = turn("fused", **config)["fused"], turn("autoregressive", **config)["autoregressive"]
    assert value(fused, "--neuron_config") == value(plain, "--neuron_config") == '{"fused_qkv": true}'
    assert "--draft_neuron_config" in fused and "--draft_neuron_config" not in plain
    assert value(fused, "--pair") == "fused" and "--pair" not in plain
    for temperatures, pair in (((0.7,), "apart"), ((0.0, 0.7), "both")):
        assert value(turn("fused", backend="nxdi", temperature=temperatures)["fused"], "--pair") == pair
    for command in (fused, plain):
        assert RoleParser().parse_args(command[len(LAUNCH) :])


def test_a_draft_on_the_hosts_cpu_is_a_torch_server_whatever_the_target_is() -> None:
    both = HostPlacement(CoreGroup("0,1", 2), CoreGroup("0,1", 2), None)
    commands, _ = deployed(
        ("distributed",), backend="nxdi", placement=both, draft_device="cpu", compiled_dir="/c", neuron_config="{}"
    )
    worker, target = commands["distributed"], commands["autoregressive"]
    assert (value(worker, "--backend"), value(worker, "--device")) == ("torch", "cpu")
    assert not {"--cores", "--compiled_dir", "--neuron_config"} & set(worker)
    assert value(target, "--backend") == "nxdi" and placed(target) == ("0,1", "2")
    for command in commands.values():
        assert RoleParser().parse_args(command[len(LAUNCH) :])


def test_the_draft_worker_is_told_where_the_target_is() -> None:
    commands, endpoints = deployed(architectures=("distributed",))
    assert list(commands) == ["autoregressive", "distributed"]
    assert value(commands["distributed"], "--target_host") == "127.0.0.1"
    assert value(commands["distributed"], "--target_port") == "5001"
    assert names(endpoints) == ["distributed"]  # the target serves, it is not compared
    assert baseline_of(endpoints) is None
    assert value(commands["distributed"], "--pipeline") == "off"


def test_a_head_stands_beside_the_draft_model_at_the_same_target() -> None:
    chosen = {"draft": "model", "draft_model": "D", "head": "H", "feature_context": 64}
    commands, endpoints = deployed(architectures=("distributed", "distributed_head"), **chosen)
    assert names(endpoints) == ["distributed", "distributed_head"]
    assert value(commands["autoregressive"], "--hand_out_features") == "on"
    assert [value(commands[name], "--draft_model") for name in commands if name != "autoregressive"] == ["D", "H"]
    head = commands["distributed_head"]
    assert (value(head, "--draft"), value(head, "--feature_context")) == ("eagle", "64")
    assert value(head, "--target_port") == value(commands["distributed"], "--target_port")
    assert "--feature_context" not in commands["distributed"]
    for drafting in ({"draft": "eagle", "draft_model": "H"}, {"draft": "hybrid", "draft_model": str(EMBEDDED_HEAD)}):
        commands, _ = deployed(architectures=("distributed", "fused"), **drafting)
        assert value(commands["autoregressive"], "--hand_out_features") == "on"
    assert "--hand_out_features" not in deployed(architectures=("distributed",))[0]["autoregressive"]
    with pytest.raises(ValueError, match="head: distributed_head needs --head DIR"):
        deployed(architectures=("distributed_head",))


def test_a_wide_target_gets_a_width_one_baseline() -> None:
    commands, endpoints = deployed(plain_width=6)
    assert value(commands["autoregressive_width_1"], "--max_speculation_length") == "0"
    assert value(commands["autoregressive_width_1"], "--role") == "target"
    assert names(endpoints) == ["autoregressive_width_1", *DEFAULTS]
    baseline = baseline_of(endpoints)
    assert baseline is not None and baseline.architecture.name == "autoregressive_width_1"


def test_connected_architectures_are_not_started() -> None:
    connect = {name: f"10.0.0.{i}:{i}" for i, name in enumerate(COMPARED, 1)}
    commands, endpoints = deployed(plain_width=6, connect=connect)
    assert commands == {}
    assert [endpoint.address for endpoint in endpoints] == [f"10.0.0.{i}:{i}" for i in range(1, 7)]
    assert all(endpoint.log is None for endpoint in endpoints)


def test_without_distributed_a_draft_worker_is_started_that_only_proposes() -> None:
    commands, endpoints = deployed(architectures=("remote_draft",), draft="ngram", model="TARGET")
    assert list(commands) == ["draft_worker", "remote_draft"]
    assert "--propose_only" in commands["draft_worker"]
    assert value(commands["draft_worker"], "--target_model") == "TARGET"
    assert value(commands["draft_worker"], "--draft") == "ngram"
    assert value(commands["remote_draft"], "--draft_host") == "127.0.0.1:5001"
    assert names(endpoints) == ["remote_draft"]  # the worker serves, it is not compared


def test_servers_started_here_show_certificates_and_tokens_to_connected_ones_alone(monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_TOKEN", "a-token-for-comparing")
    credentials = Credentials(token_env="TANDEM_TEST_TOKEN")
    commands, _ = deployed(connect={"autoregressive": "127.0.0.1:7000"}, credentials=credentials)
    assert value(commands["distributed"], "--token_env") == "TANDEM_TEST_TOKEN"
    assert "--token_env" not in commands["remote_draft"], "its draft worker was started here and asks for none"
    commands, _ = deployed(connect={"distributed": "127.0.0.1:7001"}, credentials=credentials)
    assert value(commands["remote_draft"], "--token_env") == "TANDEM_TEST_TOKEN"
    with pytest.raises(ValueError, match="connect: certificates and tokens are only for connected servers"):
        deployed(credentials=credentials)

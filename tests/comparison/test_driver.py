"""A whole comparison: real processes that only pretend to serve, and clients that answer in process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from comparison import deployment
from comparison.config import ComparisonConfig
from comparison.driver import run_comparison
from speculation.types import Chunk, Completion, GenerationRequest
from tests.comparison.fakes import MODEL, FakeError, FakeGenerator, prompt

# Takes main.py's place: the port tells which role it was started in.
STAND_IN = """
import json, os, sys, time
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]
role = value("--role") + ("_plain" if value("--max_speculation_length") == "0" else "")
role += "_driving" if "--draft_host" in sys.argv else ""
ports = {"target": 1001, "target_plain": 1002, "draft_worker": 1003, "fused_target": 1004, "target_driving": 1005}
port = ports[role]
ready = value("--ready_file")
with open(ready + ".part", "w") as file:
    json.dump({"host": "127.0.0.1", "port": port, "pid": os.getpid(), "startup_seconds": 0.1}, file)
os.replace(ready + ".part", ready)
time.sleep(60)
"""
ADDRESSES = {
    "127.0.0.1:1001": "autoregressive",
    "127.0.0.1:1002": "autoregressive_width_1",
    "127.0.0.1:1003": "distributed",
    "127.0.0.1:1004": "fused",
    "127.0.0.1:1005": "remote_draft",
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ComparisonConfig:
    main = tmp_path / "main.py"
    main.write_text(STAND_IN)
    monkeypatch.setattr(deployment, "MAIN", main)
    return ComparisonConfig(prompts=(prompt("one"), prompt("two", "prose")), output_dir=tmp_path / "out")


class Network:
    """Connects to fakes by address. `wide`: the target verifies six tokens at a time."""

    def __init__(self, wide: bool = False, generators: Sequence[FakeGenerator] = ()) -> None:
        self.wide = wide
        self.generators = {generator.name: generator for generator in generators}

    def connect(self, address: str, service: str) -> FakeGenerator:
        name = ADDRESSES[address]
        generator = self.generators.setdefault(name, FakeGenerator(name))
        generator.model = replace(MODEL, plain_width=6 if self.wide and name == "autoregressive" else 1)
        return generator


def written(config: ComparisonConfig) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((config.output_dir / "comparison.json").read_text())
    return found


def no_server_is_left(config: ComparisonConfig) -> bool:
    pids = [json.loads(path.read_text())["pid"] for path in (config.output_dir / "logs").glob("*.ready.json")]
    assert pids
    return not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_comparison_starts_servers_measures_writes_and_stops_them(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_comparison(config, Network().connect) == 0
    found = written(config)
    names = ["autoregressive", "distributed", "fused", "remote_draft"]
    assert list(found["servers"]) == names
    assert list(found["conditions"][0]["architectures"]) == names  # type: ignore[index]
    assert len(found["records"]) == 8
    output = capsys.readouterr()
    assert str(config.output_dir / "comparison.json") in output.out
    assert "distributed is ready on 127.0.0.1:1003" in output.err
    assert no_server_is_left(config)


def test_speedups_are_against_width_one_where_the_target_is_wide(config: ComparisonConfig) -> None:
    assert run_comparison(config, Network(wide=True).connect) == 0
    found = written(config)
    assert found["baseline"] == {"architecture": "autoregressive_width_1", "plain_width": 1}
    assert list(found["servers"])[:2] == ["autoregressive_width_1", "autoregressive"]


def test_divergences_are_shown_with_the_gap_of_a_second_pass_and_are_no_failure(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = FakeGenerator("autoregressive", margins=(5.0, 4.0, 0.5, 2.0, 1.0))
    fused = FakeGenerator("fused", chunks=((1, 2, 8, 4, 5),))
    assert run_comparison(config, Network(generators=[plain, fused]).connect) == 0
    assert "fused left the autoregressive output on 2 of 2" in capsys.readouterr().out
    divergences = written(config)["conditions"][0]["architectures"]["fused"]["identical_to_autoregressive"][
        "divergences"
    ]  # type: ignore[index]
    assert [one["logit_gap"] for one in divergences] == [0.5, 0.5]
    assert sum(request.report_margins for _, request in plain.calls) == 2


def test_a_failed_request_gives_exit_code_1_and_the_rest_is_still_measured(config: ComparisonConfig) -> None:
    assert run_comparison(config, Network(generators=[FakeGenerator("fused", fail_on="two")]).connect) == 1
    records = written(config)["records"]
    assert [one["architecture"] for one in records if one["error"]] == ["fused"]  # type: ignore[index]
    assert len(records) == 8


def test_a_server_that_refuses_its_arguments_gives_exit_code_2_and_its_own_line(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.MAIN.write_text("import sys; print('main.py: error: model folder X is missing'); sys.exit(2)")
    assert run_comparison(replace(config, architectures=("fused",)), Network().connect) == 2
    assert capsys.readouterr().err.splitlines() == [
        "compare_architectures.py: error: server fused exited with code 2 while starting:"
        " main.py: error: model folder X is missing"
    ]


def test_an_address_that_does_not_answer_is_one_line(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent(FakeGenerator):
        async def model_info(self):  # type: ignore[no-untyped-def]
            raise FakeError("UNAVAILABLE", "connection refused")

    network = Network(generators=[Absent("fused")])
    connected = replace(config, architectures=("fused",), connect={"fused": "127.0.0.1:1004"})
    assert run_comparison(connected, network.connect) == 1
    assert capsys.readouterr().err.splitlines() == [
        "compare_architectures.py: error: FusedSpeculativeServer at 127.0.0.1:1004 does not answer:"
        " UNAVAILABLE: connection refused"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_every_server(
    config: ComparisonConfig, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it

    class Interrupting(FakeGenerator):
        async def generate(
            self, request: GenerationRequest, timeout: float | None = None
        ) -> AsyncIterator[Chunk | Completion]:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
            yield Chunk(())

    try:
        assert run_comparison(config, Network(generators=[Interrupting("autoregressive")]).connect) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "interrupted" in capsys.readouterr().err
    assert no_server_is_left(config)

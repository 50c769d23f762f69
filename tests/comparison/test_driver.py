"""A whole comparison: real processes that only pretend to serve, and clients that answer in process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from tandem.comparison.analysis import run_analysis
from tandem.comparison.measuring import deployment
from tandem.comparison.measuring.calibration import Calibrator
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.driver import run_comparison
from tandem.comparison.measuring.workloads import Prompt
from tandem.comparison.report import plots_time, sections, terminal
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest
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
    monkeypatch.setattr(deployment, "LAUNCH", (sys.executable, str(main)))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take seconds
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


def written(config: ComparisonConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((config.output_dir / "comparison.json").read_text())
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
    assert list(found["conditions"][0]["architectures"]) == names
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
    assert "fused differs from the autoregressive output on 2 of 2" in capsys.readouterr().out
    divergences = written(config)["conditions"][0]["architectures"]["fused"]["identical_to_autoregressive"][
        "divergences"
    ]
    assert [one["logit_gap"] for one in divergences] == [0.5, 0.5]
    assert sum(request.report_margins for _, request in plain.calls) == 2


def test_a_failed_request_gives_exit_code_1_and_the_rest_is_still_measured(config: ComparisonConfig) -> None:
    assert run_comparison(config, Network(generators=[FakeGenerator("fused", fail_on="two")]).connect) == 1
    records = written(config)["records"]
    assert [one["architecture"] for one in records if one["error"]] == ["fused"]
    assert len(records) == 8


def test_a_server_that_refuses_its_arguments_gives_exit_code_2_and_its_own_line(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(deployment.LAUNCH[-1]).write_text(
        "import sys; print('main.py: error: model folder X is missing'); sys.exit(2)"
    )
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
def test_an_interrupt_before_the_first_record_stops_every_server_and_says_that_nothing_was_measured(
    config: ComparisonConfig, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    handler = signal.getsignal(number)

    class Interrupting(FakeGenerator):
        async def generate(
            self, request: GenerationRequest, timeout: float | None = None
        ) -> AsyncIterator[Chunk | GenerationEnd]:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
            yield Chunk(())

    try:
        assert run_comparison(config, Network(generators=[Interrupting("autoregressive")]).connect) == 128 + number
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert f"interrupted by {number.name}: nothing was measured" in capsys.readouterr().err
    assert no_server_is_left(config)
    kinds = [json.loads(line)["kind"] for line in (config.output_dir / "records.jsonl").read_text().splitlines()]
    assert kinds == ["run", "servers", "end"]
    assert not (config.output_dir / "comparison.json").exists()


class Numbered(FakeGenerator):
    """Counts the requests, warm-up included, and does something at one of them."""

    at = 2
    """After the warm-up and the first prompt."""

    async def generate(
        self, request: GenerationRequest, timeout: float | None = None
    ) -> AsyncIterator[Chunk | GenerationEnd]:
        if len(self.calls) == self.at:
            await self.happen()
        async for event in super().generate(request, timeout):
            yield event

    async def happen(self) -> None:
        raise NotImplementedError


def test_an_interrupt_while_measuring_leaves_a_partial_report_of_what_there_is(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting(Numbered):
        async def happen(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)

    assert run_comparison(config, Network(generators=[Interrupting("autoregressive")]).connect) == 130
    found = written(config)
    assert 4 <= len(found["records"]) < 8
    assert found["partial"] == {
        "reason": "interrupted by SIGINT",
        "measured": len(found["records"]),
        "planned": 8,
    }
    assert "PARTIAL: interrupted by SIGINT; " in capsys.readouterr().out
    assert "<title>Partial: where should" in (config.output_dir / "report.html").read_text()
    assert no_server_is_left(config)


def test_a_server_that_dies_while_measuring_leaves_a_partial_report_and_code_4(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dying(Numbered):
        async def happen(self) -> None:
            os.kill(json.loads((config.output_dir / "logs" / "fused.ready.json").read_text())["pid"], signal.SIGKILL)
            await asyncio.sleep(30)

    assert run_comparison(config, Network(generators=[Dying("autoregressive")]).connect) == 4
    found = written(config)
    assert str(found["partial"]["reason"]).startswith("server fused was killed by signal 9")
    assert "server fused was killed by signal 9" in capsys.readouterr().err
    assert no_server_is_left(config)


def test_a_server_that_dies_at_the_last_request_is_seen(config: ComparisonConfig) -> None:
    class Last(Numbered):
        async def happen(self) -> None:
            os.kill(json.loads((config.output_dir / "logs" / "fused.ready.json").read_text())["pid"], signal.SIGKILL)
            raise FakeError("UNAVAILABLE", "the server is gone")

    alone = replace(config, architectures=("fused",))
    assert run_comparison(alone, Network(generators=[Last("fused")]).connect) == 4
    assert written(config)["partial"]["measured"] == 2


def test_what_fails_in_the_measuring_itself_costs_nothing_that_was_measured(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Calibrator, prompt: Prompt) -> None:
        raise OSError("the link's process is gone")

    monkeypatch.setattr(Calibrator, "after_prompt", broken)
    assert run_comparison(config, Network().connect) == 1
    found = written(config)
    assert len(found["records"]) == 4
    assert str(found["partial"]["reason"]).startswith("OSError: the link's process is gone (test_driver.py:")


def test_an_analysis_that_fails_is_a_remark_in_a_report_of_all_the_rest(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    for name in ("theory_of", "decide"):
        monkeypatch.setattr(run_analysis, name, broken)
    for module, name in ((plots_time, "_rows"), (sections, "cause_table"), (terminal, "workload_table")):
        monkeypatch.setattr(module, name, broken)
    assert run_comparison(config, Network().connect) == 0
    found = written(config)
    assert (found["theory"], found["decision"], found["partial"]) == (None, None, None)
    assert [str(r).partition(" (")[0] for r in found["remarks"]] == [
        "Theory beside measurement could not be made: ZeroDivisionError: float division by zero",
        "The decision could not be made: ZeroDivisionError: float division by zero",
    ]
    page = (config.output_dir / "report.html").read_text()
    assert "Left out: it could not be drawn: ZeroDivisionError" in page
    assert "Remark: The table of causes could not be made: ZeroDivisionError" in page
    shown = capsys.readouterr().out
    assert "The table by workload could not be made: ZeroDivisionError" in shown
    assert "Milliseconds per token, by cause" in shown


def test_a_file_that_cannot_be_written_costs_no_other_and_is_told(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.output_dir / "comparison.json").mkdir(parents=True)
    assert run_comparison(config, Network().connect) == 1
    assert "error: comparison.json could not be made: IsADirectoryError" in capsys.readouterr().err
    assert (config.output_dir / "report.html").exists()
    assert (config.output_dir / "comparison.csv").exists()

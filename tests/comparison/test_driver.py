"""A whole comparison: real processes that only pretend to serve, and clients that answer in process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.comparison.analysis import comparison
from tandem.comparison.analysis.comparison import analyse
from tandem.comparison.measuring import commands, driver
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.measurement import Measuring
from tandem.comparison.measuring.progress import Progress
from tandem.comparison.measuring.record_log import read_records
from tandem.comparison.measuring.workloads import Prompt, given_prompts
from tandem.comparison.report import plots, tables
from tandem.comparison.report.publish import publish
from tandem.speculation.types import Chunk, GenerationEnd, GenerationRequest
from tandem.workshops.planning.host_placement import CoreGroup, HostPlacement
from tests.comparison.fakes import MODEL, FakeError, FakeGenerator, prompt
from tests.structure_workers import reaped

# Takes main.py's place: the port tells which role it was started in.
STAND_IN = """
import json, os, sys, time
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]
role = value("--role") + ("_plain" if value("--max_speculation_length") == "0" else "")
role += "_driving" if "--draft_host" in sys.argv else ""
ports = {"target": 1001, "target_plain": 1002, "draft_worker": 1003, "fused_target": 1004, "target_driving": 1005}
port = 1006 if "ngram" in sys.argv else ports[role]
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
    "127.0.0.1:1006": "lookup",
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ComparisonConfig:
    main = tmp_path / "main.py"
    main.write_text(STAND_IN)
    monkeypatch.setattr(commands, "LAUNCH", (sys.executable, str(main)))
    return ComparisonConfig(prompts=(prompt("one"), prompt("two", "prose")), output_dir=tmp_path / "out")


run_comparison = partial(driver.run_comparison, publish=publish)


class Network:
    """Connects to fakes by address. `wide`: the target verifies six tokens at a time. `draft`: who drafts."""

    def __init__(self, wide: bool = False, generators: Sequence[FakeGenerator] = (), draft: str = "") -> None:
        self.wide, self.draft = wide, draft
        self.generators = {generator.name: generator for generator in generators}

    def connect(self, address: str, service: str) -> FakeGenerator:
        name = ADDRESSES[address]
        generator = self.generators.setdefault(name, FakeGenerator(name))
        width, draft = 6 if self.wide and name == "autoregressive" else 1, "" if "auto" in name else self.draft
        generator.model = replace(MODEL, plain_width=width, draft_name=draft)
        return generator


def written(config: ComparisonConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((config.output_dir / "comparison.json").read_text())
    return found


def servers_of(found: dict[str, Any]) -> list[str]:
    return [endpoint["architecture"]["name"] for endpoint in found["endpoints"]]


def gaps_of(found: dict[str, Any]) -> list[float]:
    """The logit gaps of fused's divergences under the base."""
    (fused,) = (each for each in found["conditions"][0]["summaries"] if each["architecture"] == "fused")
    return [one["logit_gap"] for one in fused["identical"]["divergences"]]


def no_server_is_left(config: ComparisonConfig) -> bool:
    pids = [json.loads(path.read_text())["pid"] for path in (config.output_dir / "logs").glob("*.ready.json")]
    assert pids
    return all(map(reaped, pids))


def test_a_comparison_starts_servers_measures_writes_and_stops_them(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(verbose=True)
    assert run_comparison(config, Network().connect, progress=progress) == 0
    found = written(config)
    names = ["autoregressive", "lookup", "distributed", "never_waiting", "fused", "remote_draft"]
    assert servers_of(found) == names
    assert [summary["architecture"] for summary in found["conditions"][0]["summaries"]] == names
    assert len(found["records"]) == 12
    output = capsys.readouterr()
    assert f"wrote report.html and comparison.json to {config.output_dir}" in output.out
    assert "distributed is ready on 127.0.0.1:1003" in output.err and "[12/12] " in output.err
    assert no_server_is_left(config)


PLACEMENT = HostPlacement(CoreGroup("0-3", 4), CoreGroup("0,1", 2), CoreGroup("3"))


def test_placed_servers_run_in_turn_and_plain_decoding_last(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn's servers have ended before the next one's start, since a device's core has one process."""
    plain = FakeGenerator("autoregressive", margins=(5.0, 4.0, 0.5, 2.0, 1.0))
    fused = FakeGenerator("fused", chunks=((1, 2, 8, 4, 5),))
    network = Network(wide=True, generators=[plain, fused], draft="d")
    config = replace(config, placement=PLACEMENT, device="neuron", max_new_tokens=5)
    assert run_comparison(config, network.connect) == 0
    found = written(config)
    assert servers_of(found) == [
        *("autoregressive_width_1", "autoregressive", "lookup"),
        *("distributed", "never_waiting", "fused", "remote_draft"),
    ]
    assert found["baseline"] == "autoregressive_width_1"
    asked = [line["record"]["architecture"] for line in lines_of(config, "record")]
    turns = ["lookup", "distributed", "never_waiting", "fused", "remote_draft"]
    turns += ["autoregressive", "autoregressive_width_1"]
    assert asked == [name for name in turns for _ in config.prompts]
    assert any("measured in turn, each with all its cores: plain and fused" in one for one in found["remarks"])
    assert any("draft one length, 3 tokens a round: auto, the default" in one for one in found["remarks"])
    assert found["config"]["speculation_length"] == 3
    assert gaps_of(found) == [0.5, 0.5]
    calibrated = {(line["architecture"], line["length"]) for line in lines_of(config, "calibration")}
    assert {("autoregressive", 0), ("fused", 1), ("distributed", 3)} <= calibrated
    logs = sorted(str(path.relative_to(config.output_dir / "logs")) for path in config.output_dir.rglob("*.log"))
    assert logs[:2] == ["autoregressive/autoregressive.log", "autoregressive_width_1/autoregressive_width_1.log"]
    again = analyse(read_records(config.output_dir / "records.jsonl"))
    assert again.config.placement == PLACEMENT and again.missing is None


def lines_of(config: ComparisonConfig, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (config.output_dir / "records.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_own_prompts_need_a_template_or_are_given_as_they_are(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    class Plain(FakeGenerator):
        async def generate(self, request: GenerationRequest, timeout: float | None = None):  # type: ignore[no-untyped-def]
            if request.chat:
                raise FakeError("INVALID_ARGUMENT", "chat: this model has no chat template")
            async for event in super().generate(request, timeout):
                yield event

    network = Network(generators=[Plain(name) for name in ADDRESSES.values()])
    assert run_comparison(replace(config, prompts=given_prompts(("one",))), network.connect) == 2
    assert "error: raw: give your prompts as they are, with --raw: " in capsys.readouterr().err
    assert run_comparison(replace(config, prompts=given_prompts(("one",), chat=False)), network.connect) == 0


def test_a_failed_request_gives_exit_code_1_and_the_rest_is_still_measured(config: ComparisonConfig) -> None:
    assert run_comparison(config, Network(generators=[FakeGenerator("fused", fail_on="two")]).connect) == 1
    records = written(config)["records"]
    assert [one["architecture"] for one in records if one["error"]] == ["fused"]
    assert len(records) == 12


def test_a_server_that_refuses_its_arguments_gives_exit_code_2_and_its_own_line(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(commands.LAUNCH[-1]).write_text("import sys; print('main.py: error: model folder X is missing'); sys.exit(2)")
    assert run_comparison(replace(config, architectures=("fused",)), Network().connect) == 2
    assert capsys.readouterr().err.splitlines() == [
        "compare_architectures.py: error: server fused exited with code 2 while starting:"
        " main.py: error: model folder X is missing"
    ]


def test_a_folder_that_cannot_be_made_is_one_line(config: ComparisonConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_comparison(replace(config, output_dir=Path("/proc/nowhere")), Network().connect) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compare_architectures.py: error: output-dir: /proc/nowhere: ")


def test_an_address_that_does_not_answer_is_one_line(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent(FakeGenerator):
        async def model_info(self, wait=True):  # type: ignore[no-untyped-def]
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
    assert 5 <= len(found["records"]) < 12
    assert (found["missing"], found["planned"]) == ("interrupted by SIGINT", 12)
    assert "PARTIAL: interrupted by SIGINT; " in capsys.readouterr().out
    assert "This run is partial: interrupted by SIGINT" in (config.output_dir / "report.html").read_text()
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
    assert str(found["missing"]).startswith("server fused was killed by signal 9")
    assert "server fused was killed by signal 9" in capsys.readouterr().err
    assert no_server_is_left(config)


def test_a_server_that_dies_at_the_last_request_is_seen(config: ComparisonConfig) -> None:
    class Last(Numbered):
        async def happen(self) -> None:
            os.kill(json.loads((config.output_dir / "logs" / "fused.ready.json").read_text())["pid"], signal.SIGKILL)
            raise FakeError("UNAVAILABLE", "the server is gone")

    alone = replace(config, architectures=("fused",))
    assert run_comparison(alone, Network(generators=[Last("fused")]).connect) == 4
    assert len(written(config)["records"]) == 2


def test_what_fails_in_the_measuring_itself_costs_nothing_that_was_measured(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Measuring, prompt: Prompt, lengths: Iterator[int]) -> None:
        raise OSError("the link's process is gone")

    monkeypatch.setattr(Measuring, "_calibrate", broken)
    assert run_comparison(config, Network().connect) == 1
    found = written(config)
    assert len(found["records"]) == 6
    assert str(found["missing"]).startswith("OSError: the link's process is gone (test_driver.py:")


def test_an_analysis_that_fails_is_a_remark_in_a_report_of_all_the_rest(
    config: ComparisonConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(comparison, "measured_decision", broken)
    for module, name in ((plots, "_row"), (tables, "cause_table")):
        monkeypatch.setattr(module, name, broken)
    assert run_comparison(config, Network().connect) == 0
    found = written(config)
    assert (found["conditions"][0]["decision"], found["missing"]) == (None, None)
    assert found["remarks"][0].startswith("12 of 12 answers ended under 8 tokens")
    assert [str(r).partition(" (")[0] for r in found["remarks"][1:]] == [
        "The decision under base could not be made: ZeroDivisionError: float division by zero",
    ]
    page = (config.output_dir / "report.html").read_text()
    assert "The picture of speed could not be made: ZeroDivisionError" in page
    assert "broken could not be made: ZeroDivisionError" in page


def test_a_file_that_cannot_be_written_costs_no_other_and_is_told(
    config: ComparisonConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.output_dir / "comparison.json").mkdir(parents=True)
    assert run_comparison(config, Network().connect) == 1
    assert "error: comparison.json could not be made: IsADirectoryError" in capsys.readouterr().err
    assert (config.output_dir / "report.html").exists()

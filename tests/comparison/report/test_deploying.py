"""The commands of a report start what was measured."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import configuration, main
from tandem.comparison.measuring.architectures import CONNECTABLE
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.report.deploying import commands, deployment
from tandem.comparison.report.html import html
from tandem.comparison.report.sections import report_of
from tandem.speculation.types import SamplingParams
from tandem.workshops.planning.host_placement import CoreGroup, HostPlacement
from tests.comparison.fakes import prompt
from tests.comparison.report.example_comparison import example

SERVERS = {
    "autoregressive": ["target"],
    "autoregressive_width_1": ["target"],
    "fused": ["fused_target"],
    "lookup": ["fused_target"],
    "remote_draft": ["draft_worker", "target"],
    "distributed": ["target", "draft_worker"],
    "pipelined": ["target", "draft_worker"],
    "never_waiting": ["target", "draft_worker"],
    "distributed_head": ["target", "draft_worker"],
}
PLACED = HostPlacement(CoreGroup("0-7", 8), CoreGroup("0-3", 4), CoreGroup("7"))
SETTINGS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "models": {"model": "T", "draft_model": "D", "draft": "model", "dtype": "float32", "threads": 2, "batch": 2},
    "fixed length": {"speculation_length": 3, "sampling": SamplingParams(temperature=0.5), "pipeline": "auto"},
    "placed": {"model": "T", "draft_model": "D", "placement": PLACED, "device": "neuron", "compiled_dir": "/neff"},
    "pipelined": {"pipeline": "on", "weights": "q4"},
}


def commands_of(architecture: str, **settings: Any) -> list[list[str]]:
    config = ComparisonConfig((prompt("one"),), Path("unused"), **{"head": "HEAD", **settings})
    return commands(config, architecture)


@pytest.mark.parametrize("architecture", CONNECTABLE)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_server_of_an_architecture_is_understood_and_has_no_flag_in_vain(
    architecture: str, settings: dict[str, Any]
) -> None:
    found = commands_of(architecture, **settings)
    assert [command[0] for command in found] == SERVERS[architecture]
    for command in found:
        args = main.parser().parse_args(main.with_role(command))
        assert configuration.role_config(args, args.model).serve.port == int(command[command.index("--port") + 1])


def test_a_server_is_started_with_what_was_measured_and_not_with_what_only_measuring_asks_for() -> None:
    ((fused),) = commands_of("fused", **SETTINGS["models"])
    line = " ".join(fused)
    for flag in ("--target_model T", "--draft_model D", "--dtype float32", "--threads 2", "--speculation_length auto"):
        assert flag in line
    assert "--speculation_length 3" in " ".join(commands_of("fused", **SETTINGS["fixed length"])[0])
    assert "prefix_sharing" not in line and "--port 0" not in line


def test_where_draft_and_target_are_apart_each_names_the_other() -> None:
    target, worker = commands_of("distributed")
    assert worker[worker.index("--target_port") + 1] == target[target.index("--port") + 1]
    worker, target = commands_of("remote_draft")
    assert target[target.index("--draft_host") + 1].endswith(f":{worker[worker.index('--port') + 1]}")
    _, never = commands_of("never_waiting")
    assert never[never.index("--pipeline") + 1] == "never-waiting"


def test_the_page_shows_the_commands_of_what_was_decided() -> None:
    found = example()
    page = html(report_of(found), {})
    (line,) = deployment(found, found["decision"]["architecture"]).lines
    assert line.startswith("tandem fused_target ") and page.count('<pre class="command">') == 1
    assert all(f"<span>{part}" in page for part in ("tandem fused_target", "--speculation_length 3", "--port 50051"))


def test_a_connected_server_is_asked_and_not_started() -> None:
    found = copy.deepcopy(example())
    found["servers"]["fused"] |= {"started_here": False, "address": "10.0.0.7:50053"}
    command = deployment(found, "fused")
    assert command.heading.startswith("Fused runs already")
    assert command.lines[0].startswith("tandem client --target_host 10.0.0.7 --port 50053 ")


def test_names_of_folders_stay_one_argument() -> None:
    found = copy.deepcopy(example())
    found["settings"]["model"] = "/my models/$(rm -rf ~)"
    assert "--target_model '/my models/$(rm -rf ~)' " in deployment(found, "fused").lines[0]


def test_a_report_without_settings_to_start_from_has_no_command() -> None:
    found = copy.deepcopy(example())
    found["settings"]["weights"] = "unknown"
    assert report_of(found).commands == ()

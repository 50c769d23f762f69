"""vLLM as the engine of a comparison, with a server process of its API in its place."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem import compare
from tandem.cli.compare import main
from tandem.comparison.analysis.comparison import read_comparison
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.servers import ServerFailed
from tandem.comparison.measuring.workloads import given_prompts
from tandem.comparison.report.serving import deployment
from tandem.comparison.vllm.commands import serve_flags
from tandem.comparison.vllm.counters import AT_POSITION, DRAFTED, DRAFTS, parsed, stats_of
from tandem.comparison.vllm.deployment import healthy
from tandem.comparison.vllm.memory import needed, vllm_turns
from tandem.comparison.vllm.probe import Found, NoVllm
from tandem.comparison.vllm.settings import SERVED
from tandem.ports import free_port

FAKE = Path(__file__).with_name("fake_vllm.py")
ALL = tuple(SERVED)


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # they take seconds


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A program that behaves as a Python that has vLLM."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
    path.chmod(0o755)
    return str(path)


def settings(tmp_path: Path, python: str, *names: str) -> dict[str, Any]:
    return {
        "engine": "vllm",
        "vllm_python": python,
        "backend": "toy",
        "model": "salt=1",
        "draft_model": "miss=0.3,salt=1",
        "architectures": names,
        "max_new_tokens": 9,
        "output_dir": tmp_path / "out",
    }


def config(tmp_path: Path, **more: Any) -> ComparisonConfig:
    return ComparisonConfig(
        prompts=given_prompts(["a"], False), **{**settings(tmp_path, "", *ALL), "vllm_python": None, **more}
    )


@pytest.mark.thorough
def test_every_way_that_vllm_drafts_is_measured_with_its_own_counters(tmp_path: Path, python: str) -> None:
    found = compare(["one", "two"], **settings(tmp_path, python, *ALL), rtts_ms=(0.0, 5.0))
    assert not found.failed and [len(measured.summaries) for measured in found.conditions] == [5, 5]
    for of in (summary for measured in found.conditions for summary in measured.summaries):
        drafts = of.architecture != "autoregressive"
        # 9 tokens: one of the prompt, and 8 by one or by two
        assert of.acceptance.rounds == 2 * (5 if drafts else 9)
        assert (of.acceptance.drafted, of.acceptance.accepted) == ((2 * 12, 2 * 4) if drafts else (0, 0))
        assert of.identical is not None and of.identical.count == 2
        by = {"arrived": 24} if of.architecture in ("remote_draft", "never_waiting") else {}
        assert of.acceptance.drafted_by == by
    assert {endpoint.model.backend for endpoint in found.endpoints} == {"vLLM 0.0.fake"}


def test_a_text_that_leaves_vllm_s_own_is_counted_with_where_it_does(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "leaves")
    found = compare(["one"], **settings(tmp_path, python, "autoregressive", "lookup"))
    of = found.base.of("lookup")
    assert of is not None and of.identical is not None
    assert (of.acceptance.rounds, of.acceptance.drafted, of.acceptance.accepted) == (5, 12, 4)
    assert (of.identical.count, of.identical.total, of.identical.divergences[0].position) == (0, 1, 4)


def test_servers_that_have_no_room_beside_each_other_are_measured_in_turn(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.comparison.vllm.memory.free_bytes", lambda: 0)
    found = compare(["one"], **settings(tmp_path, python, "autoregressive", "fused"))
    assert [record.architecture for record in found.records] == ["autoregressive", "fused"] and not found.failed
    assert any("one after the other" in remark for remark in found.remarks)
    assert (tmp_path / "out" / "logs" / "fused" / "fused.log").is_file()


def test_a_server_that_does_not_start_is_said_with_its_last_line(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "fails")
    with pytest.raises(ServerFailed, match="server lookup exited with code 1 while starting: no memory for the drafts"):
        compare(["one"], **settings(tmp_path, python, "autoregressive", "lookup"))


@pytest.mark.parametrize("named", [None, "/no/such/python", sys.executable])
def test_a_missing_vllm_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.delenv("TANDEM_VLLM_PYTHON", raising=False)
    with pytest.raises(NoVllm, match=r"^vllm-python: no vLLM \(.*install_vllm_cpu.sh .venv-vllm.*$") as refused:
        compare(["one"], **{**settings(tmp_path, "", "autoregressive"), "vllm_python": named})
    assert "\n" not in str(refused.value)


def test_the_command_line_refuses_a_missing_vllm_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TANDEM_VLLM_PYTHON", raising=False)
    flags = ("--engine", "vllm", "--model", "M", "--draft-model", "D", "--prompt", "a", "--output-dir", str(tmp_path))
    assert main(flags) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and "no vLLM (none is named)" in errors[0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"architectures": ("distributed",)}, "architectures: vLLM has no distributed"),
        ({"model": None}, "model: --engine vllm needs the folder"),
        ({"draft_model": None}, "draft-model: vLLM's draft_model"),
        ({"speculation_length": 0}, "speculation-length: vLLM's is a fixed number"),
        ({"connect": {"lookup": "a:1"}}, "connect: lookup=a:1 is no server of vLLM, which has a URL"),
        ({"engine": "tandem", "connect": {"lookup": "http://a:1"}}, "as servers of --engine vllm have"),
        ({"head": "H"}, "head: is not for --engine vllm"),
        ({"engine": "tandem", "vllm_args": "--seed 1"}, "vllm-python: is for --engine vllm"),
        ({"engine": "sglang"}, "engine: 'sglang' is not one of tandem, vllm"),
    ],
)
def test_what_is_not_measured_with_vllm_is_refused(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(tmp_path, **wrong)


def test_servers_run_one_after_the_other_where_memory_does_not_allow_more(tmp_path: Path) -> None:
    asked, found = config(tmp_path), Found("python", "0", "cpu")
    room = len(ALL) * needed(asked)
    assert vllm_turns(asked, found, room) == [ALL]
    in_turn = vllm_turns(asked, found, room - 1)
    assert in_turn[-1] == ("autoregressive",) and sorted(sum(in_turn, ())) == sorted(ALL)
    assert vllm_turns(asked, replace(found, device="cuda"), room) == in_turn


def test_the_flags_are_those_of_vllm_s_server_and_further_ones_of_the_user(tmp_path: Path) -> None:
    flags = serve_flags(config(tmp_path, dtype="float32", vllm_args="--enforce-eager --seed 3"), "fused")
    drafts = json.loads(flags[flags.index("--speculative-config") + 1])
    assert drafts == {"method": "draft_model", "model": "miss=0.3,salt=1", "num_speculative_tokens": 3}
    assert flags[-3:] == ["--enforce-eager", "--seed", "3"] and flags[flags.index("--dtype") + 1] == "float32"
    assert "--speculative-config" not in serve_flags(config(tmp_path), "autoregressive")


def test_positions_of_drafts_of_unknown_length_are_not_made_up() -> None:
    at = {(AT_POSITION, "0"): 4.0, (AT_POSITION, "1"): 2.0}
    even = stats_of({(DRAFTS, ""): 5.0, (DRAFTED, ""): 10.0, **at})
    assert (even.drafted_per_position, even.accepted_per_position) == ([5, 5], [4, 2])
    uneven = stats_of({(DRAFTS, ""): 5.0, (DRAFTED, ""): 9.0, **at})
    assert (uneven.drafted_per_position, uneven.accepted_per_position) == ([5], [4])


def test_a_page_that_is_no_page_of_counters_counts_nothing() -> None:
    assert parsed("<html>\nvllm:spec_decode_num_drafts_total{ 3\nother_total 4\nvllm:x_total nan\n") == {}
    two_engines = 'vllm:x_total{engine="0"} 1.0\nvllm:x_total{engine="1"} 2.0\n'
    assert parsed(two_engines) == {("vllm:x_total", ""): 3.0}


@contextlib.contextmanager
def running(*flags: str) -> Iterator[str]:
    """The URL of a server of vLLM that runs already."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-S", FAKE, "server", "--model", "m", "--port", str(port), *flags])
    try:
        give_up = time.monotonic() + 60
        while not healthy(port):
            assert time.monotonic() < give_up and process.poll() is None
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_servers_of_vllm_that_run_already_are_measured_as_what_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_VLLM_PYTHON", raising=False)  # none is needed
    drafts = "--speculative-config", json.dumps({"num_speculative_tokens": 3})
    with running() as plain, running(*drafts) as ngram, running(*drafts) as waiting:
        flags = ("--engine", "vllm", "--prompt", "one", "--prompt", "two", "--max-new-tokens", "9")
        named = ("--architectures", "autoregressive,lookup,remote_draft", "--output-dir", str(tmp_path))
        urls = (f"autoregressive={plain}", f"lookup={ngram}/v1", f"remote_draft={waiting}")
        assert main((*flags, *named, *(each for url in urls for each in ("--connect", url)))) == 0
    found = read_comparison(tmp_path / "comparison.json")
    of = {summary.architecture: summary for summary in found.base.summaries}
    rounds = {name: summary.acceptance.rounds for name, summary in of.items()}
    assert rounds == {"autoregressive": 18, "lookup": 10, "remote_draft": 10}
    assert (of["remote_draft"].acceptance.drafted, of["remote_draft"].acceptance.accepted) == (24, 8)
    assert of["lookup"].identical and of["lookup"].identical.count == 2
    assert {endpoint.model.backend for endpoint in found.endpoints} == {"vLLM 0.0.fake"}
    assert deployment(found, "lookup").lines[0].startswith(f"curl {ngram}/v1/completions ")
    (said,) = [each for each in found.remarks if "against its own texts" in each]
    assert "again, 2 of 2 are the same; asked for all of them at once, 2 of 2 are the same." in said


def test_where_vllm_leaves_its_own_plain_text_is_said(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "wavers")
    asked = settings(tmp_path, python, "autoregressive", "lookup")
    found = compare(["one"], **asked, dtype="bfloat16")
    (said,) = [remark for remark in found.remarks if "against its own texts" in remark]
    assert "in bfloat16: asked for each prompt again, 0 of 1 are the same (the earliest difference: token 3 of" in said


def test_servers_that_run_already_take_no_memory_of_those_that_are_started(tmp_path: Path) -> None:
    connected = {name: f"http://a:{port}" for port, name in enumerate(("autoregressive", "lookup"), 1)}
    asked, found = config(tmp_path, connect=connected), Found("python", "0", "cpu")
    assert vllm_turns(asked, found, 3 * needed(asked)) == [ALL]
    in_turn = vllm_turns(asked, found, 3 * needed(asked) - 1)
    assert in_turn[-1] == ("autoregressive", "lookup") and len(in_turn) == 4
    assert vllm_turns(asked, None, 0) == [ALL]

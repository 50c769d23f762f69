"""The result of a comparison as a file, on the page and on the terminal."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from benchmarks.chromium import browser, opened
from tandem.cli import configuration, main
from tandem.comparison.analysis.comparison import Comparison, analyse, comparison_as_text, read_comparison
from tandem.comparison.analysis.step_times import step_times
from tandem.comparison.measuring.commands import server_command
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import Failure, Record
from tandem.comparison.report.page import html, page_of
from tandem.comparison.report.publish import records_as_csv
from tandem.comparison.report.serving import commands
from tandem.comparison.report.terminal import print_comparison
from tandem.host.device_times import text_of, times_named
from tandem.speculation.types import Rehearsal
from tests.comparison.fakes import MEASUREMENT, prompt, record, run_of
from tests.comparison.made_up import NAMES, Shape, measured

FAILED = Record("fused", "code/b", "code", 0, error=Failure("UNAVAILABLE", "gone [away] <b>"))
BUSY = (0.001, 0.004, 0.009, 0.016, 0.25)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def made_up(folder: Path) -> RunData:
    """Every kind of condition that there is, with times drawn at random."""
    shape = Shape(prompts=4, rtts=(0.0, 20.0), temperatures=(0.0, 0.8), concurrency=(1, 4), load_requests=4)
    made = measured(shape, BUSY, Random(1), folder)
    return replace(made, config=replace(made.config, capacity_ms=9.0, max_num_completed_requests=None))


def printed(found: Comparison, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_comparison(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def of(*records: Record) -> Comparison:
    made = run_of(records)
    made.margins["base", "code/a"] = replace(MEASUREMENT, margins=(1.0, 0.0625, 1.0))
    return analyse(made)


def test_the_file_is_the_result_and_gives_the_same_page(tmp_path: Path, without_plots: None) -> None:
    found = analyse(made_up(tmp_path))
    (path := tmp_path / "comparison.json").write_text(comparison_as_text(found))
    again = read_comparison(path)
    assert html(again) == html(found) and printed(again) == printed(found)
    assert comparison_as_text(again) == path.read_text()


def test_files_that_are_not_of_this_version_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    whole = json.loads(comparison_as_text(analyse(made_up(tmp_path))))
    for text, said in (
        (None, "does not exist"),
        ("{", "cannot be read"),
        (json.dumps({**whole, "schema_version": 3}), "has schema version 3, and 4 is needed: measure again"),
        (json.dumps({**whole, "more": 1}), "is not what this version writes: .*unknown more"),
        (json.dumps({"schema_version": 4}), "is not what this version writes"),
    ):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=said) as caught:
            read_comparison(path)
        assert "\n" not in str(caught.value)


def test_the_page_is_one_file_without_scripts_with_at_most_four_pictures(tmp_path: Path) -> None:
    page = html(analyse(made_up(tmp_path)))
    assert page.count("<svg") == 4 and "could not be" not in page
    assert not any(sign in page for sign in ("<script", "http://", "https://www", 'src="'))
    assert page.count("prefers-color-scheme: dark") == 1 and "var(--fused)" in page


def test_what_came_from_outside_is_escaped(without_plots: None) -> None:
    page = html(of(record("autoregressive", text="<script>"), record("fused", text="<script>"), FAILED))
    assert "<script" not in page and "gone [away] &lt;b&gt;" in page and "Pictures need matplotlib" in page


def test_a_divergence_and_a_failure_are_plain_to_see(without_plots: None) -> None:
    found = of(record("autoregressive"), record("fused", output_token_ids=(1, 9, 3), text="axc"), FAILED)
    text = printed(found)
    row = next(line for line in text.splitlines() if "code/a, run 0" in line)
    assert row.split() == ["fused", "base", "code/a,", "run", "0", "1", "9", "2", "0.0625"]
    row = next(line for line in text.splitlines() if "code/b, run 0" in line)
    assert row.split() == ["fused", "base", "code/b,", "run", "0", "UNAVAILABLE", "gone", "[away]", "<b>"]
    assert "0 of 1 outputs have the tokens of plain decoding" in text and "fused (1 of 2 failed)" in text
    assert "<mark>xc</mark>" in html(found)


def test_every_figure_is_whole_on_a_terminal_of_80_columns(tmp_path: Path) -> None:
    names = ("autoregressive", "distributed", "fused")
    text = printed(analyse(measured(Shape(names, rtts=(0.0,)), BUSY, Random(2), tmp_path)), 80)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80


def test_the_csv_has_one_row_per_record() -> None:
    rows = list(csv.DictReader(io.StringIO(records_as_csv([record("fused"), FAILED], "a-device"))))
    assert json.loads(rows[0]["output_token_ids"]) == [1, 2, 3] and rows[0]["verify_seconds"] == "0.2"
    assert (rows[1]["ttft_s"], rows[1]["error_code"]) == ("", "UNAVAILABLE")
    assert {row["rehearsed"] for row in rows} == {"a-device"}


def test_a_partial_run_and_a_round_trip_that_was_not_measured_are_named(tmp_path: Path, without_plots: None) -> None:
    made = measured(Shape(names=("autoregressive", "fused"), rtts=(0.0, 20.0), keep=0.2), BUSY, Random(1), tmp_path)
    found = analyse(made)
    for text in (printed(found), html(found).replace("\N{NO-BREAK SPACE}", " ")):
        assert "interrupted by SIGINT; " in text and "At 20 ms: not measured." in text


def test_rehearsed_steps_are_named_first_and_are_not_step_times_of_this_machine(
    tmp_path: Path, without_plots: None
) -> None:
    plain = measured(Shape(prompts=4), (0.01, 0.02), Random(1), tmp_path)
    told = Rehearsal("target", "trn2-llama-8b", "trn2.3xlarge", "a page", 100, 3, 0.006)
    ends = tuple(replace(each, model=replace(each.model, rehearsals=(told,))) for each in plain.endpoints)
    made = replace(plain, endpoints=ends, config=replace(plain.config, rehearse="trn2-llama-8b"))
    found, count = analyse(made), len(ends)
    first = f"not this machine's; {3 * count} of {100 * count} steps were late, by 2.0 ms on average"
    assert first in found.caveats[0] and page_of(found)["title"].endswith("(rehearsed)")
    assert step_times(made) is None and analyse(plain).caveats == ()
    times = step_times(plain)
    assert times and times.target and times.draft
    (file := tmp_path / "step_times.json").write_text(text_of(times))
    assert times_named(str(file)) == times
    assert server_command(made.config, "target")[-2:] == ["--rehearse", "trn2-llama-8b"]


@pytest.mark.parametrize("architecture", NAMES)
def test_the_commands_serve_what_was_measured(architecture: str, tmp_path: Path) -> None:
    config = ComparisonConfig(
        (prompt("a"),), tmp_path, model="T", draft="model", draft_model="D", dtype="float32", head="h"
    )
    for command in commands(config, architecture):
        args = main.parser().parse_args(main.with_role(command))
        port = int(command[command.index("--port") + 1])
        assert configuration.role_config(args, args.model).serve.port == port
        assert "--dtype float32" in " ".join(command) and not {"--host", "--prefix_sharing"} & set(command)


def test_a_server_that_ran_already_is_asked(tmp_path: Path, without_plots: None) -> None:
    tpots = {"autoregressive": 0.02, "fused": 0.01}
    records = [record(name, str(i), tpot_s=tpot_s) for name, tpot_s in tpots.items() for i in range(60)]
    found = analyse(run_of(records, {"autoregressive": "10.0.0.1:5", "fused": "10.0.0.1:7"}))
    (command,) = page_of(found)["commands"]
    assert command.lines == ("tandem client --target_host 10.0.0.1 --port 7 --prompt 'Why is the sky blue?'",)


@pytest.mark.thorough
@pytest.mark.skipif(browser() is None, reason="needs chromium (Debian and Ubuntu: apt install chromium)")
def test_a_phone_needs_no_scrolling_sideways_and_a_desk_sees_the_decision(tmp_path: Path) -> None:
    made = measured(Shape(NAMES[:4], prompts=4, rtts=(0.0, 20.0)), BUSY, Random(1), tmp_path)
    (path := tmp_path / "report.html").write_text(html(analyse(made)))
    with opened(str(browser())) as page:
        for size in ((390, 844), (1400, 900)):
            page.show(path.as_uri(), size)
            assert page.run("document.documentElement.scrollWidth") <= size[0]
            assert page.run("document.querySelector('.headline').getBoundingClientRect().bottom") < size[1]
        assert page.run("document.documentElement.scrollHeight") <= 4000

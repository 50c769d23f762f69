"""The result of a comparison as a file, on the page and on the terminal."""

from __future__ import annotations

import io
import itertools
import json
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from benchmarks.chromium import browser, opened
from tandem.cli import configuration, main
from tandem.cli.command_line import RoleParser
from tandem.comparison.analysis.comparison import Comparison, analyse, comparison_as_text, read_comparison
from tandem.comparison.measuring.commands import server_command
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.measuring.records import Failure, Record, Seconds
from tandem.comparison.report import sentences
from tandem.comparison.report.page import html, page_of
from tandem.comparison.report.printed import Detail, print_comparison
from tandem.comparison.report.publish import step_times
from tandem.comparison.report.serving import serving
from tandem.host.device_times import text_of, times_named
from tandem.speculation.types import Rehearsal
from tests.comparison.fakes import MEASUREMENT, prompt, record, run_of
from tests.comparison.made_up import NAMES, Shape, measured

FAILED = Record("fused", "code/b", "code", 0, error=Failure("UNAVAILABLE", "gone [away] <b>"))
BUSY = (0.001, 0.004, 0.009, 0.016, 0.25)


def made_up(folder: Path) -> RunData:
    """Every kind of condition that there is, with times drawn at random."""
    shape = Shape(prompts=4, rtts=(0.0, 20.0), temperatures=(0.0, 0.8), concurrency=(1, 4), load_requests=4)
    made = measured(shape, BUSY, Random(1), folder)
    return replace(made, config=replace(made.config, capacity=9.0, max_num_completed_requests=None))


def printed(found: Comparison, width: int = 200, detail: Detail = "short") -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_comparison(found, console, detail)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def of(*records: Record) -> Comparison:
    made = run_of(records)
    made.margins["base", "code/a"] = replace(MEASUREMENT, margins=(1.0, 0.0625, 1.0))
    return analyse(made)


def decided(
    winner: str, connect: Mapping[str, str] | None = None, names: Sequence[str] = ("autoregressive", "fused")
) -> Comparison:
    records = [record(name, str(i), tpot_s=0.01 if name == winner else 0.02) for name in names for i in range(60)]
    return analyse(run_of(records, connect))


def test_the_file_is_the_result_and_gives_the_same_page(tmp_path: Path) -> None:
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
        (json.dumps({**whole, "schema_version": 3}), "has schema version 3, and 5 is needed: measure again"),
        (json.dumps({**whole, "more": 1}), "is not what this version writes: .*unknown more"),
        (json.dumps({"schema_version": 5}), "is not what this version writes"),
    ):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=said) as caught:
            read_comparison(path)
        assert "\n" not in str(caught.value)


def test_the_page_is_one_file_without_scripts_with_at_most_four_pictures(tmp_path: Path) -> None:
    page = html(analyse(made_up(tmp_path)))
    assert page.count("<figure") == 4 and "could not be" not in page
    assert not any(sign in page for sign in ("<script", "<link", "@import", "url(", "src=", "href="))
    assert page.count("prefers-color-scheme: dark") == 1


def test_the_causes_of_overlapping_steps_add_up_to_the_whole_time(tmp_path: Path) -> None:
    longer = Seconds(2.0, 2.0, 0.0, 0.0, 1.0, 0.0)  # 5 s in a request of 2 s
    found = of(record("autoregressive"), record("never_waiting", seconds_by_cause=longer, other_clamped=True))
    summary = found.base.of("never_waiting")
    assert summary and sum(each or 0.0 for each in summary.milliseconds_per_token.values()) == pytest.approx(2000 / 3)
    assert "In 1 request they overlap, and are scaled to it." in html(found)


def test_what_came_from_outside_is_escaped() -> None:
    page = html(of(record("autoregressive", text="<script>"), record("fused", text="<script>"), FAILED))
    assert "<script" not in page and "gone [away] &lt;b&gt;" in page


def test_a_divergence_and_a_failure_are_plain_to_see() -> None:
    found = of(record("autoregressive"), record("fused", output_token_ids=(1, 9, 3), text="axc"), FAILED)
    text = printed(found)
    row = next(line for line in text.splitlines() if "code/a, run 0" in line)
    assert row.split() == ["fused", "base", "code/a,", "run", "0", "1", "9", "2", "0.0625"]
    row = next(line for line in text.splitlines() if "code/b, run 0" in line)
    assert row.split() == ["fused", "base", "code/b,", "run", "0", "UNAVAILABLE", "gone", "[away]", "<b>"]
    assert "0 of 1 outputs have the tokens of plain decoding" in text and "fused (1 of 2 failed)" in text
    assert '<td data-head="answer">a▸xc</td>' in html(found)


@pytest.mark.parametrize("width", [80, 130])
def test_every_figure_is_whole_on_a_terminal(width: int, tmp_path: Path) -> None:
    """Without room intervals go, then columns; the decision, the first run's and each load's stay."""
    found = analyse(replace(made_up(tmp_path), endpoints=made_up(tmp_path).endpoints))
    text = printed(found, width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert all(verdict.sentence in " ".join(text.split()) for verdict in found.decisions)


def test_a_first_run_prints_at_most_40_lines_with_its_rehearsal() -> None:
    found = decided("fused")
    lines = printed(found, 80).splitlines()
    assert len(lines) <= 18 and any(line.startswith("Serve it: make serve ARGS=") for line in lines)
    assert printed(found, 500, "decision").splitlines() == [
        found.decision and found.decision.sentence,
        *sentences.doubts(found.decision),
    ]
    assert json.loads(printed(found, 80, "json"))["conditions"][0]["decision"]["sentence"] == found.decision.sentence


def test_a_partial_run_and_a_round_trip_that_was_not_measured_are_named(tmp_path: Path) -> None:
    made = measured(Shape(names=("autoregressive", "fused"), rtts=(0.0, 20.0), keep=0.2), BUSY, Random(1), tmp_path)
    found = analyse(made)
    for text in (printed(found), html(found).replace("\N{NO-BREAK SPACE}", " ")):
        assert "interrupted by SIGINT; " in text and "At 20 ms: not measured." in text


def test_rehearsed_steps_are_named_first_and_are_not_step_times_of_this_machine(tmp_path: Path) -> None:
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
@pytest.mark.parametrize("root", [None, Path.cwd()])
def test_the_commands_serve_what_was_measured_where_it_was_measured(
    architecture: str, root: Path | None, tmp_path: Path
) -> None:
    config = ComparisonConfig(
        (prompt("a"),), tmp_path, model="T", draft="model", draft_model="a $D", dtype="float32", head="h"
    )
    lines = serving(config, architecture, root)
    for port, line in zip(("50051", "0")[-len(lines) :], lines, strict=True):
        program, *words = shlex.split(line)
        if program == "make":  # which runs what `make -n` shows
            shown = subprocess.run(["make", "-n", *words], capture_output=True, text=True, check=True).stdout
            (run,) = [each for each in shown.splitlines() if "main.py --role serve" in each]
            program, *words = shlex.split(run)
        assert program == "tandem" if root is None else shutil.which(program) and words.pop(0) == "main.py"
        args = RoleParser().parse_args(main.with_role(words))
        assert configuration.role_config(args, args.model).serve.port == int(port)
        assert args.dtype == "float32" and args.host == "127.0.0.1" and "prefix_sharing" not in args.given
    assert args.http_port == 8080


def test_a_server_that_ran_already_needs_no_command() -> None:
    found = decided("fused", {"autoregressive": "10.0.0.1:5", "fused": "10.0.0.1:7"})
    assert page_of(found)["command"] is None and "Serve it" not in printed(found)


@pytest.mark.thorough
@pytest.mark.skipif(browser() is None, reason="needs chromium (Debian and Ubuntu: apt install chromium)")
def test_a_phone_needs_no_scrolling_sideways_and_a_desk_sees_decision_plot_and_command(tmp_path: Path) -> None:
    everything, two = tmp_path / "everything.html", tmp_path / "two.html"
    everything.write_text(html(analyse(made_up(tmp_path))))
    two.write_text(html(decided("fused", names=NAMES[:6])))
    with opened(str(browser())) as page:
        for file, folded in itertools.product((everything, two), (True, False)):
            for width in (390, 1400):
                page.show(file.as_uri(), (width, 900))
                if not folded:
                    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
                assert page.run("document.documentElement.scrollWidth") <= width
                outside = (
                    "[...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > innerWidth)"
                )
                assert page.run(f"{outside}.map(e => e.outerHTML.slice(0, 200))") == []
            assert not folded or page.run("document.documentElement.scrollHeight") <= 4000
        page.show(two.as_uri(), (1400, 900))
        bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
        assert page.run(bottom.format(".headline")) < page.run(bottom.format("figure")) < 900
        assert page.run(bottom.format(".command")) < 900

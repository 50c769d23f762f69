"""A comparison whose servers rehearse labels its figures, and one that measured writes the times to rehearse."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tandem.comparison.analysis.caveats import caveats
from tandem.comparison.analysis.run_analysis import analyse
from tandem.comparison.analysis.step_times import step_times
from tandem.comparison.measuring.commands import server_command
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.record_log import RunData
from tandem.comparison.report.files import comparison_as_csv, comparison_as_json
from tandem.comparison.report.markdown import markdown
from tandem.comparison.report.sections import report_of
from tandem.comparison.report.terminal import head_lines, terminal_blocks
from tandem.host.device_times import text_of
from tandem.host.published_times import times_named
from tandem.speculation.model_info import Rehearsal
from tests.comparison.fakes import prompt
from tests.comparison.made_up import Shape, measured


def run(folder: Path) -> RunData:
    return measured(Shape(prompts=4), (0.01, 0.02), Random(1), folder)


def rehearsed(folder: Path, late: int = 0) -> RunData:
    made = run(folder)
    told = Rehearsal("target", "trn2-llama-8b", "trn2.3xlarge", "a page", 100, late, late * 0.002)
    ends = (replace(each, model=replace(each.model, rehearsals=(told,))) for each in made.endpoints)
    return replace(made, endpoints=tuple(ends), config=replace(made.config, rehearse="trn2-llama-8b"))


def test_the_first_line_says_whose_times_they_are_and_how_many_were_late(tmp_path: Path) -> None:
    comparison = comparison_as_json(analyse(rehearsed(tmp_path, late=3)))
    first, _ = next(iter(head_lines(comparison)))
    assert first.startswith("Note: Rehearsed:")
    endpoints = len(comparison["servers"])
    assert "trn2.3xlarge (a page)" in first
    assert f"{3 * endpoints} of {100 * endpoints} steps were late, by 2.0 ms on average" in first


def test_title_tables_and_plots_are_labelled(tmp_path: Path) -> None:
    comparison = comparison_as_json(analyse(rehearsed(tmp_path)))
    report = report_of(comparison)
    assert report.title.endswith("(rehearsed)")
    captions = [block.caption for block in terminal_blocks(comparison) if getattr(block, "caption", "")]
    assert captions and all(caption.endswith("(rehearsed)") for caption in captions)
    plots = [block for section in report.sections for block in section.blocks if block.kind == "plot"]
    assert plots and all(plot.title.endswith("(rehearsed)") for plot in plots)
    assert "> Rehearsed:" in markdown(report, {})


def test_a_measured_comparison_has_no_such_label(tmp_path: Path) -> None:
    made = run(tmp_path)
    assert caveats(made.endpoints) == []
    assert "(rehearsed)" not in markdown(report_of(comparison_as_json(analyse(made))), {})


def test_records_have_the_name_of_the_times(tmp_path: Path) -> None:
    made = rehearsed(tmp_path)
    rows = list(csv.DictReader(io.StringIO(comparison_as_csv(made.records, made.config.rehearse))))
    assert {row["rehearsed"] for row in rows} == {"trn2-llama-8b"}
    assert {row["rehearsed"] for row in csv.DictReader(io.StringIO(comparison_as_csv(made.records)))} == {""}


def test_a_measured_run_gives_a_file_that_can_be_rehearsed(tmp_path: Path) -> None:
    times = step_times(run(tmp_path))
    assert times and times.target and times.draft
    file = tmp_path / "step_times.json"
    file.write_text(text_of(times))
    assert times_named(str(file)) == times
    assert step_times(rehearsed(tmp_path)) is None
    json.loads(file.read_text())


def test_every_server_of_the_comparison_is_told(tmp_path: Path) -> None:
    config = ComparisonConfig(prompts=(prompt("one"),), output_dir=tmp_path, rehearse="trn2-llama-8b")
    for role in ("target", "draft_worker", "fused_target"):
        command = server_command(config, role)
        assert command[command.index("--rehearse") + 1] == "trn2-llama-8b"
    with pytest.raises(ValueError, match="rehearse: 'nothing' is neither"):
        replace(config, rehearse="nothing")
    with pytest.raises(ValueError, match="rehearse: is for servers that are started here"):
        replace(config, connect={"fused": "127.0.0.1:1"})

"""Workloads that others publish, read where the user has them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tandem.cli.compare import build_config
from tandem.cli.compare_flags import build_parser
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.loads import arrivals
from tandem.comparison.measuring.others_workloads import read_arrivals, rescaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:06.9799600,110,27
"""


def questions(folder: Path, *extra: str) -> Path:
    file = folder / "question.jsonl"
    asked = [(81, "writing"), (82, "writing"), (91, "qa")]
    lines = [json.dumps({"question_id": i, "category": kind, "turns": [f"ask {i}", "again"]}) for i, kind in asked]
    file.write_text("\n".join([*lines, *extra]))
    return file


def configured(*flags: str) -> ComparisonConfig:
    return build_config(build_parser().parse_args(flags))


def test_the_first_turns_of_every_category_are_asked(tmp_path: Path) -> None:
    file = str(questions(tmp_path))
    found = configured("--spec-bench", file).prompts
    assert [(each.name, each.kind, each.text) for each in found] == [
        ("writing/81", "writing", "ask 81"),
        ("writing/82", "writing", "ask 82"),
        ("qa/91", "qa", "ask 91"),
    ]
    chosen = configured("--spec-bench", file, "--workloads", "qa,writing", "--prompts-per-workload", "1").prompts
    assert [each.name for each in chosen] == ["qa/91", "writing/81"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question_id": 1, "category": "qa"}', "line 4: not a question of Spec-Bench: no 'turns'"),
        ('{"question_id": 1, "category": "qa", "turns": []}', "line 4"),
        ("no JSON", "line 4"),
        ('{"question_id": 1, "category": "qa", "turns": [""]}', "no text or no category"),
    ],
)
def test_a_file_that_has_other_lines_is_refused(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said) as error:
        configured("--spec-bench", str(questions(tmp_path, line)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--spec-bench", "/nowhere"), "spec-bench: /nowhere: No such file"),
        (("--spec-bench", "{file}", "--workloads", "prose"), "workloads: 'prose' is not one of writing, qa"),
        (("--spec-bench", "{file}", "--prompt", "mine"), "do not go together with your own"),
        (("--arrivals", "{file}", "--rate", "1"), "no column TIMESTAMP"),
        (("--arrivals", "{azure}"), "arrivals: give the --rate"),
        (("--arrivals", "/nowhere", "--rate", "1"), "arrivals: /nowhere: No such file"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(AZURE)
    named = {"file": str(questions(tmp_path)), "azure": str(azure)}
    with pytest.raises(ValueError, match=said):
        configured(*(flag.format(**named) for flag in flags))


def test_recorded_arrivals_keep_their_bursts_at_any_rate(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    assert read_arrivals(file) == pytest.approx((0.0, 0.052, 3.0))
    config = configured("--arrivals", str(file), "--rate", "0.5,2", "--max-num-completed-requests", "3")
    assert [load.pattern for load in config.loads] == [str(file)] * 2
    assert arrivals(2.0, 3, 0, str(file)) == pytest.approx((0.0, 0.052 / 3, 1.0))


def test_a_trace_that_is_too_short_begins_again() -> None:
    found = rescaled((0.0, 1.0, 4.0), rate=1.0, count=7)
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert gaps[0] == pytest.approx(gaps[3]) and gaps[1] == pytest.approx(3 * gaps[0])
    assert found[-1] == pytest.approx(6.0)

"""The benchmark of links: what it reads from a comparison, its bars, and a short run of real servers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks import links
from benchmarks.links import main
from benchmarks.links_judged import Cell, bars_of
from tandem.comparison.links.link_settings import read_trace

GOOD = Cell("20 ms", 0.026, 0.020, 0.018, 4, 4)


def test_bars_hold_only_where_every_cell_does() -> None:
    assert [holds for _, holds in bars_of([GOOD] * 3)] == [True] * 3
    slow = Cell("50 ms", 0.026, 0.017, 0.0171, 4, 4)
    said = bars_of([GOOD, slow])
    assert [holds for _, holds in said] == [True, False, True]
    assert said[1][0].endswith("1.01 at 50 ms")
    assert not bars_of([Cell("20 ms", 0.026, 0.020, 0.018, 3, 4)])[0][1]
    assert not bars_of([Cell("20 ms", 0.020, 0.020, 0.018, 4, 4)])[2][1]


def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"{tmp_path}/nothing,{tmp_path}/nothing"])
    assert ended.value.code == 2 and "No such file" in capsys.readouterr().err


def test_a_hostile_link_doubles_its_waits_from_one_second_to_the_next_or_is_out_for_two(tmp_path: Path) -> None:
    doubling, outages, narrow = links.hostile(tmp_path)
    times = read_trace(doubling.flags[-1].split(",")[1])
    gaps = [{b - a for a, b in itertools.pairwise(times) if b > a and a // 1000 == second} for second in range(5)]
    assert [max(gap) for gap in gaps[:4]] == [20, 40, 80, 160] and 320 in gaps[4]
    out = read_trace(outages.flags[-1].split(",")[1])
    assert max(b - a for a, b in itertools.pairwise(out)) == 2000
    assert narrow.flags[-2:] == ("--up-mbps", "1")


def test_cells_are_chosen_by_name_or_part_and_a_name_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = links.cells_asked(["a/x.up,a/x.down"], tmp_path)
    assert [cell.name for cell in links.chosen("20ms,recorded", cells)] == ["20ms", "1-x"]
    assert links.chosen(None, cells) == cells and links.chosen("none", cells) == []
    with pytest.raises(SystemExit) as ended:
        main(["--only", "20", "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "--only: 20 is none of constant, recorded, hostile, 10ms" in capsys.readouterr().err

"""The benchmark of adapters: which rows have which, and what it makes of the times that it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.adapters import BARE, BASE, kinds_of, linear_sizes, made_adapter, main, parse, ratio, report
from tests.runners.test_native import module_of, native


def test_kinds_are_rows_of_one_adapter_of_all_and_of_some() -> None:
    one, several, half = kinds_of(8, [5, 6, 7], 4)
    assert one.adapters == (5, 5, 5, 5)
    assert several.adapters == (5, 6, 7, 5) and "3 adapters" in several.name
    assert half.adapters == (0, 6, 0, 5)


def test_made_adapters_fit_a_models_linear_layers() -> None:
    runner = native(module_of())
    adapter = made_adapter(linear_sizes(runner.model.sizes), runner.model.layer_count, 3, 1)
    assert len(adapter.parts) == 7 * runner.model.layer_count
    runner.put_adapter(1, adapter)


def test_a_ratio_is_the_median_over_turns_of_the_same_turns_base() -> None:
    times = {BASE: [1.0, 2.0, 10.0], "rank 8: one adapter": [1.5, 2.2, 30.0], BARE: [1.0, 1.0, 10.0]}
    assert ratio(times, "rank 8: one adapter") == pytest.approx(1.5)
    lines = report({"auto, 8 rows, width 1": times})
    assert [line.split()[-1] for line in lines[1:]] == ["1.000", "1.500", "1.000"]


@pytest.mark.parametrize("embedded", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_run_times_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, embedded: bool
) -> None:
    if not embedded:
        monkeypatch.setattr("benchmarks.adapters.loaded", lambda settings, weights, rows: native(module_of()))
    small = ("--runs", "1", "--rows", "2", "--widths", "2", "--ranks", "2", "--adapters", "2", "--context", "8")
    assert main([*small, "--formats", "auto", "--output", str(tmp_path / "it.json")]) == 0
    said = capsys.readouterr().out
    assert said.count("ratio") == 5 and "auto, 2 rows, width 2" in said and (tmp_path / "it.json").is_file()


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(SystemExit):
        parse(["--ranks", "0"])

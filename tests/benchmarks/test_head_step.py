"""The benchmark of heads' steps: what it times beside what, and what it prints of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.head_step import main, parsed
from tests.runners.tiny import model_folder


def test_every_format_is_timed_beside_module_code_and_printed_with_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, target = tmp_path / "found.json", str(model_folder(tmp_path / "target", seed=5))
    flags = ["--shapes", "96x200", "--formats", "float32,int8", "--weights", "float32", "--runs", "2", "--rows", "2"]
    assert not main(["--target-model", target, *flags, "--output", str(output)])
    found = json.loads(output.read_text())
    assert found["target"] == "float32" and set(found["96x200"]) == {"median", "fastest"}
    medians = found["96x200"]["median"]
    assert set(medians) == {"target", "native, float32", "native, int8/float32", "module code"}
    module = medians["module code"]
    assert module["next"] == pytest.approx((module["draft"] - module["first"]) / 3)
    assert module["rest"] == pytest.approx(module["round"] - module["drafting"])
    lines = {line[:24].strip(): line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert lines["module code"] == ["-", "1.0"] and "native, int8/float32" in lines


def test_rounds_of_one_token_have_no_next_step() -> None:
    with pytest.raises(SystemExit):
        parsed(["--k", "1"])

"""The notebook of examples/ runs from its first cell to its last, with a real server and the embedded pair."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
from pathlib import Path

import pytest

from tests.support import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "tandem.ipynb"


def test_the_notebook_is_small_and_holds_no_output() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert sum(len(cell["source"]) for cell in code) < 50
    assert [cell["outputs"] for cell in code if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.docs
@pytest.mark.timeout(400)
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its kernel is that of .venv-docs and also sees what is installed in this environment."""
    python = REPOSITORY / ".venv-docs" / "bin" / "python"
    path = os.pathsep.join([str(REPOSITORY), *site.getsitepackages()])
    done = subprocess.run(
        [python, Path(__file__).with_name("run_notebook.py"), NOTEBOOK],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    _, answer, acceptance, alike, _, comparison = json.loads(done.stdout)
    accepted, drafted, rounds = map(int, re.findall(r"\d+", acceptance.partition("\n")[0]))
    assert len(answer) > 100 and 0 < accepted < drafted and rounds < 64
    assert re.match(r"none +47 rounds for 48 tokens", alike) and "fused" in comparison

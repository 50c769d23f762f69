"""Every command of deploy/README.md is understood by the program that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.cli.roles import ROLES
from tandem.workshops.ray_serve.application import parser

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
LINES = [
    line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in map(str.strip, block.splitlines())
]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("python ")])
def test_a_command_is_understood(line: str) -> None:
    _, *words = shlex.split(line)
    if words[:2] == ["-m", "tandem.workshops.ray_serve.application"]:
        words = ["main.py", *parser().parse_args(words[2:]).flags]
    if words[0] == "deploy/cloudwatch.py":
        assert (ROOT / words[0]).is_file() and words[2:4] == ["--condition", "concurrency 1"]
        return
    assert words[0] == "main.py"
    assert main.parser().parse_args(words[1:]).role in ROLES

"""The commands of README and of the pages for users run as they are written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli import compare
from tests.pages import walk
from tests.pages.commands import ROOT, commands_of

COMMANDS = [command for page in walk.PAGES for command in commands_of(page)]
LINES = [command.line for command in COMMANDS if command.kind == "bash"]
ALONE = ["unshare", "-rn", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""A network of its own, in which the ports of the pages are free, and whose processes end with the first one."""
NEEDS_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is absent: apt install curl")


def walked(*pages: Path) -> subprocess.CompletedProcess[str]:
    """Walks pages in a network of their own where that is allowed, else in this one."""
    program = [sys.executable, "-m", "tests.pages.walk", *map(str, pages)]
    if (
        shutil.which("unshare")
        and subprocess.run([*ALONE, "ip", "link"], capture_output=True, check=False).returncode == 0
    ):
        program = [*ALONE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *program]
    return subprocess.run(program, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=1700, check=False)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@NEEDS_CURL
def test_every_command_of_the_pages_runs_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    done = walked()
    with capsys.disabled():
        print("\n" + done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    ran, checked, elsewhere, failed = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert ran > 40 and ran + elsewhere == len(COMMANDS) and checked == failed == 0


@pytest.mark.thorough
def test_a_wrong_command_fails_the_walk_and_the_next_ones_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    wrong = ("python main.py --role target --backend toy --prt 50051", "curl -s http://127.0.0.1:8080/v1/models")
    right = "python main.py --role doctor"
    page.write_text(f"```bash\n{wrong[0]}\n{wrong[1]}\n{right}\n```\n```python\nraise SystemExit(3)\n```\n", "utf-8")
    done = walked(page)
    verdicts = re.findall(r"^  (\w+) +[\d.]+ s  (\S+)", done.stdout, re.MULTILINE)
    assert verdicts == [("failed", "python"), ("failed", "curl"), ("ran", "python"), ("failed", "python:")]
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "1 ran, 0 checked, 0 elsewhere, 3 failed"


@pytest.mark.parametrize("begins", walk.ELSEWHERE)
def test_a_command_that_runs_elsewhere_is_on_a_page(begins: str) -> None:
    assert [line for line in LINES if re.match(begins, line)]


@pytest.mark.parametrize(
    "line", [line for line in dict.fromkeys(LINES) if walk.COMPARISON.match(line) and not walk.why_elsewhere(line)]
)
def test_a_shortened_comparison_of_a_page_is_one_that_can_be_configured(line: str) -> None:
    words = shlex.split(walk.shortened(line), comments=True)
    arguments = shlex.split(words[2].removeprefix("ARGS=")) if words[0] == "make" else words[2:]
    config = compare.build_config(compare.build_parser().parse_args(arguments))
    assert config.max_new_tokens == 8 and len(config.prompts) <= 2

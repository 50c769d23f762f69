"""make serve, as README.md begins with it: its own first lines, then the page's curl."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.support import HANG, REPOSITORY

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("make") is None, reason="make is absent"),
    pytest.mark.skipif(not (REPOSITORY / ".venv" / ".set-up-serve").exists(), reason="make setup has not run here"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is absent: apt install curl"),
]


@pytest.fixture
def served() -> Iterator[list[str]]:
    """What make serve prints once it serves: the base URL, and a curl line."""
    command = ["make", "-s", "serve", "ARGS=--http_port 0"]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | {"CI": ""}
    )
    try:
        assert process.stdout
        lines: list[str] = []
        while not (lines and lines[-1].startswith("curl ")):
            line = process.stdout.readline()
            assert line, f"it ended: {lines}"
            lines.append(line.strip())
        yield lines[-2:]
    finally:
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        process.communicate(timeout=HANG)


def asked(command: str) -> str:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    if '"stream": true' not in command:
        return str(json.loads(done.stdout)["choices"][0]["message"]["content"])
    *events, end = re.findall(r"^data: (.*)$", done.stdout, re.MULTILINE)
    assert end == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


def test_make_serve_answers_its_own_curl_line_and_the_readmes(served: list[str]) -> None:
    url = re.findall(r"base URL (\S+),", served[0])[0]
    own = asked(served[1])
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (readme,) = re.findall(r"^curl [^\n]*\\\n[^\n]*$", page, re.MULTILINE)
    assert "http://127.0.0.1:8080/v1" in readme
    theirs = asked(readme.replace("\\\n", " ").replace("http://127.0.0.1:8080/v1", url))
    assert own and theirs

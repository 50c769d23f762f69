"""deploy/README.md: its commands are understood by what they name, and what it names is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.workshops.ray_serve.application import parser
from tests.recipes import programs

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
LINES = [
    line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in map(str.strip, block.splitlines())
]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("python ")])
def test_a_command_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *words = shlex.split(line)
    if words[:2] == ["-m", "tandem.workshops.ray_serve.application"]:
        words = ["main.py", *parser().parse_args(words[2:]).flags]
    if words[:2] == ["-m", "dynamo.frontend"]:
        assert words[2:] == ["--discovery-backend", "file", "--http-port", "8000"]  # as it was run by hand
        return
    if words[0] == "deploy/dynamo/tandem_worker.py":
        monkeypatch.syspath_prepend(str(ROOT / "deploy" / "dynamo"))
        import tandem_worker  # type: ignore[import-not-found]

        assert tandem_worker.arguments().parse_args(words[1:]).discovery_backend == "file"
        return
    if words[0] == "deploy/cloudwatch.py":
        assert (ROOT / words[0]).is_file() and words[2:4] == ["--condition", "concurrency 1"]
        return
    assert words[0] == "main.py"
    assert main.parser().parse_args(words[1:]).role in main.ROLES


@pytest.mark.parametrize("line", [line for line in LINES if re.match(r"(aws|docker|eksctl|helm|kubectl|sh) ", line)])
def test_a_command_of_another_program_is_one_that_it_has(line: str) -> None:
    programs.check(shlex.split(line))


def test_a_cluster_of_ray_is_started_before_an_application_as_rays_own_command_does() -> None:
    words = [shlex.split(line)[1:] for line in LINES if line.startswith("ray ")]
    words += [shlex.split(said)[1:] for said in re.findall(r"`(ray [^`]+)`", TEXT)]
    serve = next(at for at, line in enumerate(LINES) if "ray_serve.application" in line)
    assert len(words) == 2 and LINES.index("ray start --head --dashboard-host 127.0.0.1") < serve
    start = pytest.importorskip("ray.scripts.scripts", reason="ray is absent: pip install '.[ray]'").start
    known = {name for parameter in start.params for name in parameter.opts}
    assert all(each[0] == "start" and {w for w in each if w.startswith("--")} <= known for each in words)


def test_folders_that_are_named_exist_and_every_overlay_is_named() -> None:
    named = set(re.findall(r"`(?:deploy/)?(k8s/[\w/-]+)`", TEXT)) | set(re.findall(r"-k deploy/(k8s/\S+)", TEXT))
    assert [path for path in named if not (ROOT / "deploy" / path).is_dir()] == []
    overlays = {f"k8s/overlays/{path.name}" for path in (ROOT / "deploy" / "k8s" / "overlays").iterdir()}
    assert overlays <= named


def test_images_are_built_as_the_container_file_says() -> None:
    file = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    commands = [line for line in LINES if line.startswith("docker build")]
    said = {" ".join(line.lstrip("# ").split()) for line in file.splitlines() if "docker build" in line}
    assert set(commands) == said

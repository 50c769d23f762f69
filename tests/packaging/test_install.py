"""What `pip install` gives: one importable name, a light client, and the embedded pair."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.checkpoints.locate import EMBEDDED_DRAFT
from tests.packaging.environments import build_wheels, environment, output, pins, pip, run
from tests.support import GREEDY, HANG, REPOSITORY, ServerProcess, oracle, server_process

pytestmark = pytest.mark.thorough

pytest.importorskip("setuptools", reason="builds the wheel without a network: pip install setuptools")
WEIGHTS = ("embedded_draft", "embedded_head")
"""Folders that are in packages of their own."""
MINE = "MINE = 'written by the user'\n"
ASK = """
import sys
import models, services
from tandem import Client

assert models.MINE and services.MINE
assert not {'torch', 'transformers'} & sys.modules.keys()
with Client(sys.argv[1]) as client:
    print(*client.generate([1, 2, 3], max_new_tokens=8).token_ids)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheels(tmp_path_factory.mktemp("wheels"), "tandem", "draft")


@pytest.fixture(scope="module")
def wheel(wheels: Path) -> Path:
    (found,) = wheels.glob("tandem_speculative-[0-9]*.whl")
    return found


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the base install alone, at the versions that are pinned."""
    folder = tmp_path_factory.mktemp("light")
    python = environment(folder / "venv")
    pip(python, "install", "--quiet", "-c", pins(folder), wheel)
    return python


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A folder with the user's own packages `models` and `services`, and the toy backend."""
    (tmp_path / "tests").mkdir()
    shutil.copy(REPOSITORY / "tests" / "toy.py", tmp_path / "tests")
    for package in ("models", "services"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(MINE)
    return tmp_path


def files_to_ship() -> set[str]:
    """Modules and data of the packages, under the names that they are installed by; weights are not among them."""
    found: set[str] = set()
    for top, prefix in (("tandem", ""), *((top, "tandem/") for top in ("services", "clients", "workshops"))):
        paths = [path for path in (REPOSITORY / top).rglob("*") if path.is_file() and path.suffix != ".pyc"]
        paths = [path for path in paths if path.parent.name not in WEIGHTS]
        found |= {prefix + path.relative_to(REPOSITORY).as_posix() for path in paths}
    return found


def test_the_wheel_holds_every_file_of_tandem_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entries,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    shipped = {name for name in names if ".dist-info/" not in name}
    assert shipped == files_to_ship()
    assert "tandem = tandem.cli.main:console" in entries


def test_the_light_install_talks_to_a_server_beside_the_users_own_packages(light: Path, user: Path) -> None:
    said = " ".join(map(str, oracle([1, 2, 3], GREEDY, 8)))
    with server_process(user, "--role", "target") as server:
        assert output(light, user, "-c", f"import sys; sys.path.insert(0, ''){ASK}", server.wait_ready()) == said
        ask = ("client", "--port", str(server.port), "--prompt", "hi", "--max_new_tokens", "4")
        by_role = output(light, user, "tandem", "--role", *ask)
        assert output(light, user, "tandem", *ask) == by_role != ""
        assert output(light, user, "-m", "tandem", *ask) == by_role


def test_the_light_install_runs_the_toy_roles_and_names_the_extra_that_others_need(light: Path, user: Path) -> None:
    alone = ("verify_target", "--backend", "toy", "--prompt", "hi", "--max_new_tokens", "4")
    assert "token" in output(light, user, "tandem", *alone, PYTHONPATH=str(user))
    shown = output(light, user, "tandem", "--help")
    assert "fused_target" in shown and "compare" in shown and "main.py" not in shown
    without = output(light, user, "-c", "from tandem.checkpoints.locate import embedded_draft as e; print(e())")
    assert without == "None"
    draft = ("draft", "--target_host", "127.0.0.1:1", "--prompt", "x")
    for model in (("--model", str(EMBEDDED_DRAFT)), ()):
        for role in (("target", "--port", "0"), ("verify_target", "--prompt", "x"), draft):
            refused = run(light, user, "tandem", *role, *model)
            line = refused.stderr.splitlines()[-1]
            assert refused.returncode == 2 and line.startswith("tandem: ") and "tandem-speculative[serve]" in line
            assert "nothing listens" not in refused.stderr, "models are looked for before a server is called"
    refused = run(light, user, "tandem", "compare", "--backend", "toy", "--prompt", "x")
    assert refused.returncode == 2 and "tandem-speculative[comparison]" in refused.stderr.splitlines()[-1]


def serve_and_ask(python: Path, user: Path, *flags: str) -> str:
    """What a client in the environment gets from a server in it."""
    program: Sequence[str] = ("-m", "tandem")
    server = ServerProcess(user, *flags, "--port", "0", program=program, python=str(python))
    try:
        address = server.wait_ready(4 * HANG)
        code = (
            "import sys; from tandem import Client\nwith Client(sys.argv[1]) as client:\n"
            "    print(client.generate('one, two, three, four, five,', max_new_tokens=8).text)"
        )
        return output(python, user, "-c", code, address)
    finally:
        server.process.kill()
        server.process.wait()


def test_an_installed_tandem_runs_the_embedded_pair(wheels: Path, user: Path) -> None:
    python = environment(user / "venv", borrow=True)
    pip(python, "install", "--quiet", "--no-deps", "--no-index", *wheels.glob("*.whl"))
    installed = output(python, user, "-c", "import tandem.services as s; print(s.__file__)")
    assert Path(installed).is_relative_to(user / "venv")
    assert "six" in serve_and_ask(python, user, "fused_target")

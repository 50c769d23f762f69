"""The command that installs what is missing is that of the way in which Tandem was installed."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.installing import IN_A_CHECKOUT, install_command

COMMIT = "831ef239667be743b938f76a99341f00bad0ba7e"


class Installed:
    """An installed distribution, and what pip recorded of where it came from."""

    def __init__(self, source: str | None) -> None:
        self.source = source

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.source


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (None, "pip install 'tandem-speculative[torch]'"),
        (
            {"url": "file:///tmp/my%20wheels/tandem_speculative-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install --find-links '/tmp/my wheels' 'tandem-speculative[torch]'",
        ),
        ({"url": "file:///src/tandem", "dir_info": {}}, "pip install '/src/tandem[torch]'"),
        ({"url": "file:///src/tandem", "dir_info": {"editable": True}}, "pip install -e '/src/tandem[torch]'"),
        (
            {"url": "https://example.org/t.whl", "archive_info": {}},
            "pip install 'tandem-speculative[torch] @ https://example.org/t.whl'",
        ),
        (
            {"url": "https://example.org/t.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"pip install 'tandem-speculative[torch] @ git+https://example.org/t.git@{COMMIT}'",
        ),
        ([], "pip install 'tandem-speculative[torch]'"),
        ({"url": 7}, "pip install 'tandem-speculative[torch]'"),
    ],
)
def test_an_installed_package_is_extended_from_where_it_came(
    monkeypatch: pytest.MonkeyPatch, source: object, command: str
) -> None:
    installed = Installed(None if source is None else json.dumps(source))
    monkeypatch.setattr(metadata, "distribution", lambda name: installed)
    assert install_command("torch") == command


def test_a_checkout_sets_itself_up_and_a_copied_package_asks_the_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert install_command("torch") == IN_A_CHECKOUT == "make setup"
    monkeypatch.setattr("tandem.installing._ROOT", tmp_path)
    assert install_command("torch") == "pip install 'tandem-speculative[torch]'"
    assert install_command("http") == "pip install 'tandem-speculative[http]'"
    monkeypatch.setattr("tandem.installing.find_spec", lambda name: None)  # a light install: http is not enough
    assert install_command("http") == install_command("weights") == "pip install 'tandem-speculative[serve]'"


def test_a_distribution_of_its_own_that_is_absent_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == "tandem_nxdi"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tandem_nxdi", None)
    assert main.main(["--role", "target", "--backend", "nxdi", "--model", "m"]) == 2
    said = capsys.readouterr().err
    assert "tandem-nxdi is not installed: pip install tandem-nxdi" in said and said.count("\n") == 1

"""`tandem completion SHELL`: what the scripts complete, asked of the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.cli.completion import SHELLS, script
from tandem.cli.flags import FLAGS
from tandem.cli.roles import COMMANDS, ROLES


def completed(*words: str) -> set[str]:
    """What bash offers for the last of the words."""
    line = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tandem; printf \'%s\\n\' "${COMPREPLY[@]}"'
    asked = ["bash", "-c", f"{script('bash')}\n{line}", "bash", "tandem", *words]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(done.stdout.split())


def test_roles_and_commands_are_completed_first() -> None:
    assert completed("") == {*ROLES, *COMMANDS} == completed("--role", "")
    assert completed("fused") == {"fused_target", "fused_client"}


@pytest.mark.parametrize("role", ["target", "client", "plan"])
def test_the_flags_of_a_role_are_completed_and_no_others(role: str) -> None:
    own = {f"--{name}" for name, flag in FLAGS.items() if role in flag.roles} | {"--help"}
    assert completed(role, "--") == own == completed("--role", role, "--debug", "--")
    assert completed("serve", "--http_") == {"--http_port", "--http_host", "--http_keep_alive_seconds"}
    assert "--prompt-file" in completed("compare", "--pro")


def test_values_are_completed_where_there_is_a_choice() -> None:
    assert completed("target", "--backend", "") == {"torch", "nxdi", "toy"}
    assert completed("target", "--pipeline", "never") == {"never-waiting"}
    assert completed("target", "--speculation-length", "") == {"auto"}
    assert completed("completion", "") == set(SHELLS)
    assert completed("target", "--model", "") == completed("target", "") == set()  # files, by the shell's default


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_takes_the_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", shell], "tandem") == 0
    (tmp_path / "script").write_text(printed := capsys.readouterr().out)
    assert "fused_target" in printed and "pipeline" in printed
    if shutil.which(shell):
        done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", "bsh"], "tandem") == 2
    assert capsys.readouterr().err == "tandem: completion: 'bsh' is not one of bash, zsh; did you mean bash?\n"

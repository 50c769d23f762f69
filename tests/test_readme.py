"""The README's commands are real: each is parsed by the program it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tandem.cli import compare, configuration, main

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("python ")]


def test_the_readme_shows_every_role() -> None:
    shown = {word for line in COMMANDS for word in shlex.split(line)}
    table = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"target", "fused_target", "draft_worker", "client", "draft", "fused_client"} <= shown
    assert all(f"`{role}`" in table for role in main.ROLES)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_is_understood(command: str) -> None:
    _, program, *arguments = shlex.split(command, comments=True)
    if program == "main.py":
        args = main.parser().parse_args(arguments)
        assert args.role in main.ROLES
        if args.prompt or args.prompt_text:
            configuration.client_config(args)
        elif args.role in ("target", "draft_worker"):
            configuration.role_config(args, args.model)
    elif program == "compare_architectures.py":
        compare.build_parser().parse_args(arguments)
    else:
        assert program == "-m" and Path(ROOT, *arguments[0].split(".")).with_suffix(".py").is_file()

"""Runs the commands of pages, in their order.

    python -m tests.pages.walk [PAGE...]       # default: README and the pages for users

Commands of README and of the pages for users run as they are written, with their models and ports; those of recipes
with stand-ins (recipe.py). Every page begins without servers. A command that starts a server starts it beside the
following ones, until another one takes its port or the page ends; every other command must end with 0. Prints each
command with `ran`, `checked`, `elsewhere` or `failed`, then the reasons of ELSEWHERE, and exits with 1 if one failed.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.cli import main as cli
from tandem.cli.command_line import RoleParser
from tests.pages import models
from tests.pages.commands import RECIPES, ROOT, Command, commands_of
from tests.pages.machine import Machine
from tests.pages.recipe import Recipe

PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("tutorials", "openai", "python", "running", "receipts", "comparison")),
)
PLACEHOLDERS = {
    r"(?<=--draft-model )DIR\b|\bDRAFT_DIR\b|/models/Qwen3-0\.6B": "Llama-1B",
    r"\bDIR\b|/models/Qwen3-4B": "Llama-8B",
}
"""A page's names of a reader's models, and the models of 2 layers over bytes that are there instead."""
INSTEAD = {"--device neuron": "--device cpu", "--tp_degree 4": "--tp_degree 2"}
"""Flags of a server that need a device, and their place here."""
ELSEWHERE = {
    r"make test\b": "the suite that this test belongs to",
    r"make wheels": "needs the package index; tests/packaging/ builds the same wheels by packages/build.py",
    r"pip install ": "changes the environment; tests/packaging/ installs wheels in fresh ones",
    r"ssh ": "needs a second machine; the servers of both are on this one",
    r"python deploy/first-hour/first_hour\.py trn2\.3xlarge$": "needs a Trainium instance; --print runs here",
    r"python compare_architectures\.py --device neuron ": "needs a Trainium or Inferentia instance",
    r"python compare_architectures\.py --backend nxdi ": "needs a Trainium or Inferentia instance",
}
"""Commands that cannot run here, by their beginning. tests/pages/test_commands.py checks them."""
COMPARISON = re.compile(r"(?:make compare|python compare_architectures\.py|tandem compare)\b")
SHORT = "--max-new-tokens 8"
SHORT_PROMPTS = "--workloads chat --prompts-per-workload 1"
SHORT_LOAD = "--max-num-completed-requests 2 --mean-output-tokens 8"
SHORT_SET = "--architectures autoregressive,distributed"
FEWER = {r"--rate 0\.": "--rate 10,20", r"--rtt-ms (\d+,){3}": "--rtt-ms 0,100"}
"""Flags that shorten comparisons: SHORT each; SHORT_PROMPTS those without a prompt file; SHORT_LOAD those with a load;
SHORT_SET those with flags that name no architectures; FEWER those that match, with quicker loads or fewer links."""
SERVERS = ("target", "fused_target", "draft_worker", "prefill", "serve")
ARGUMENTS_OF_MAKE = frozenset({"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS"})
"""`make thorough ARGS=...` hands its arguments to every make beneath it; a reader's shell has none of them."""
CHAT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
TANDEM = "#!/bin/sh\nexec python -c 'import sys; from tandem.cli.main import console; sys.exit(console())' \"$@\"\n"
"""The command that an installation adds; the wheel's own is run by tests/packaging/."""


@dataclass(frozen=True)
class Step:
    command: Command
    verdict: str
    how: str
    seconds: float

    def __str__(self) -> str:
        return f"  {self.verdict:9} {self.seconds:5.1f} s  {self.command.title[:160]}{self.how and f' ({self.how})'}"


class Desk:
    """A folder like a checkout after `make setup`, where a page's commands run as they are written.

    `results`, `done`: of all pages: a comparison of an earlier page is not run again.
    """

    def __init__(self, folder: Path, results: Path, done: set[str]) -> None:
        (folder / "results").symlink_to(results)
        for path in ROOT.iterdir():
            if path.name not in (".git", ".venv", "results", "__pycache__"):
                (folder / path.name).symlink_to(path)
        venv, installed = folder / ".venv", folder / "installed"
        venv.mkdir()
        for path in Path(sys.prefix).iterdir():
            (venv / path.name).symlink_to(path)
        (venv / ".set-up").unlink(missing_ok=True)
        (venv / ".set-up").touch()  # later than every pin: nothing is due
        installed.mkdir()
        (installed / "tandem").write_text(TANDEM)
        (installed / "tandem").chmod(0o755)
        own = {name: value for name, value in os.environ.items() if name not in ARGUMENTS_OF_MAKE}
        path = os.pathsep.join([str(venv / "bin"), str(installed), os.environ["PATH"]])
        self.machine = Machine(folder, {**own, "PATH": path, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"})
        self.done = done

    def step(self, command: Command) -> str:
        if command.kind == "python":
            self.machine.run(["python", "-"], command.line)
            return "ran"
        if why_elsewhere(command.line):
            return "elsewhere"
        line = self._with_files(command.line)
        if COMPARISON.match(line):
            if command.line not in self.done:
                self.machine.run(["bash", "-c", shortened(line)])
                self.done.add(command.line)
        elif ports := ports_of(line):
            for flag, here in INSTEAD.items():
                line = line.replace(flag, here)
            self.machine.serve(["bash", "-c", line], *ports)
        else:
            output = self.machine.run(["bash", "-c", line])
            assert not line.startswith("curl ") or '"error"' not in output, output
        return "ran"

    def _with_files(self, line: str) -> str:
        """The line with models, and the newest comparison.json, of this machine."""
        folder = self.machine.folder
        for pattern, name in PLACEHOLDERS.items():
            if re.search(pattern, line):
                (folder / "models").mkdir(exist_ok=True)
                model = models.write(folder / "models" / name)
                (model / "chat_template.jinja").write_text(CHAT)
                line = re.sub(pattern, str(model), line)
        reports = sorted(folder.glob("results/*/comparison.json"))
        return re.sub(r"(?<!/)\bcomparison\.json\b", str(reports[-1]), line) if reports else line


def walk(page: Path, place: Desk | Recipe) -> Iterator[Step]:
    with place.machine:
        for command in commands_of(page):
            began, how = time.monotonic(), ""
            try:
                verdict = place.step(command)
            except (Exception, SystemExit) as error:
                verdict, how = "failed", f"{type(error).__name__}: {error}"
            yield Step(command, verdict, how, time.monotonic() - began)


def why_elsewhere(line: str) -> str:
    return next((reason for begins, reason in ELSEWHERE.items() if re.match(begins, line)), "")


def shortened(line: str) -> str:
    more = [SHORT] + [SHORT_PROMPTS] * ("--prompt-file" not in line)
    more += [SHORT_LOAD] * ("--concurrency" in line or "--rate" in line)
    more += [SHORT_SET] * ("--" in line and not re.search("--(architectures|connect) ", line))
    more += [fewer for many, fewer in FEWER.items() if re.search(many, line)]
    if not line.startswith("make "):
        return " ".join([line, *more])
    arguments = line.partition("ARGS=")[2].strip('"')
    return f'make compare ARGS="{" ".join([arguments, *more])}"'


def ports_of(line: str) -> tuple[int, int] | None:
    """The ports for gRPC and HTTP of the server that a command starts (0: none); None if it starts none."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["make", "serve"]:
        arguments = ["serve"]
    elif words[:2] == ["python", "main.py"]:
        arguments = words[2:]
    elif words[0] == "tandem":
        arguments = words[1:]
    else:
        return None
    args = RoleParser().parse_args(cli.with_role(arguments))
    if args.role not in SERVERS:
        return None
    return args.port, args.http_port or (8080 if args.role == "serve" else 0)


def main(arguments: list[str]) -> int:
    done: set[str] = set()
    steps = []
    with tempfile.TemporaryDirectory() as made:
        results = Path(made, "results")
        results.mkdir()
        for number, page in enumerate([Path(name).resolve() for name in arguments] or PAGES):
            print(page.relative_to(ROOT) if page.is_relative_to(ROOT) else page, flush=True)
            folder = Path(made, str(number))
            folder.mkdir()
            place = Recipe(page, folder) if page in RECIPES else Desk(folder, results, done)
            for step in walk(page, place):
                steps.append(step)
                print(step, flush=True)
    print("not run by this walk:")
    for line in (step.command.line for step in steps if step.verdict == "elsewhere"):
        print(f"  {line.partition(' #')[0].strip()}: {why_elsewhere(line)}")
    verdicts = ("ran", "checked", "elsewhere", "failed")
    print(", ".join(f"{sum(step.verdict == verdict for step in steps)} {verdict}" for verdict in verdicts))
    return int(any(step.verdict == "failed" for step in steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

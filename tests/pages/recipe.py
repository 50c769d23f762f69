"""Runs a recipe's commands on this machine, and checks those of other programs.

In place of a device: `--device cpu`, under torchrun 2 processes for the page's 8 and sequences of 1024 tokens; to
compile, one process of tests/runners/strict_device.py and SMALL_GRAPHS. In place of NxD Inference: its stand-in of
tests/runners/nxdi. In place of models: small ones with a tokenizer over bytes; a plan reads the public models' own
config.json. In place of other hosts: this one, on free ports. Clients and comparisons generate 8 tokens.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.cli.command_line import RoleParser
from tandem.launch import free_port
from tests.pages import checks, models
from tests.pages.commands import ROOT, Command
from tests.pages.machine import Machine
from tests.planning.support import CONFIGS, device, neuron_ls

RANKS, LENGTH = "2", "1024"
ONE_MACHINE = ("50051", "50053")
"""Ports of servers that a page starts in turn on the same cores."""
SMALL_GRAPHS = {"--batch": "1", "--sequence_length": "128", "--speculation_length": "1"}
LENGTHS = ("--max-new-tokens", "--mean-input-tokens", "--mean-output-tokens", "--max-num-completed-requests")
LOCAL = re.compile(r"(?:[\w-]+\.internal|qwen-[a-z]+|localhost|127\.0\.0\.1)(?=:|$|/)")
HOST_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")
PORTS = ("--port", "--target_port", "--http_port")
METRICS = "9400"
STAND_IN = """
import sys
if {{"nxdi", "--backend=nxdi"}} & {{*sys.orig_argv}}:
    sys.path.append({root!r})
    import pytest
    from tests.runners.nxdi import simulated
    simulated.install(pytest.MonkeyPatch())
"""


class Recipe:
    """`folder` is where commands run."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.ports: dict[str, str] = {}
        self.started: dict[str, list[str]] = {}  # the last server's words by the page's port
        for name in ("models", "site"):
            (folder / name).mkdir()
        (folder / "site" / "sitecustomize.py").write_text(STAND_IN.format(root=str(ROOT)))
        instance = Command(page, "").instance
        chips, cores = (1, 2) if instance.startswith("trn1") else (16, 4)
        neuron_ls(folder, says=[device(n, instance, cores, 96 * 2**30, None) for n in range(chips)])
        (folder / "prompt.txt").write_text("The history of AI\n")
        (folder / "docs").symlink_to(ROOT / "docs")
        environment = {
            **os.environ,
            "PATH": f"{folder / 'opt/aws/neuron/bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
            "HF_HUB_OFFLINE": "1",
            "PET_MASTER_PORT": self._port("29500"),  # torchrun's own
        }
        self.machine = Machine(folder, environment)

    def step(self, command: Command) -> str:
        """Returns `ran`, or `checked` for another program's command."""
        with pytest.MonkeyPatch.context() as patch:
            checks.check(command, patch)
        if command.program == "curl":
            self._curl(command)
        elif command.program == "sh":
            self.machine.run(["sh", str(ROOT / command.words[1]), *command.words[2:]])
        elif command.program == "compare_architectures.py":
            self._compare(command)
        elif command.program == "main.py":
            self._role(command)
        else:
            return "checked"
        return "ran"

    def _port(self, number: str) -> str:
        """The free port that stands for a page's."""
        if number not in self.ports:
            self.ports[number] = str(free_port())
        return self.ports[number]

    def _words(self, words: Sequence[str]) -> list[str]:
        """A page's words with this machine's folders, host and ports."""
        found, folder = [], self.machine.folder
        for before, word in zip(("", *words), words, strict=False):
            if before in PORTS:
                word = self._port(word)
            if model := re.fullmatch(r"/models/([\w.-]+)", word):
                place = folder / "models" / model[1]
                word = str(place if before == "--output" or model[1] == "compiled" else models.write(place))
            word = word.replace('"/models/', f'"{folder}/models/')
            word = LOCAL.sub("127.0.0.1", word)
            found.append(HOST_PORT.sub(lambda m: self._port(m[0]), word))
        return found

    def _role(self, command: Command) -> None:
        args = RoleParser().parse_args(command.arguments)
        environment = [f"{name}={value}" for name, value in command.variables.items()]
        if args.role == "plan":
            words = [re.sub(r"^/models/", f"{CONFIGS}/", word) for word in command.arguments]
            self.machine.run([sys.executable, str(ROOT / "main.py"), *words])
        elif args.role in checks.SERVERS:
            if str(args.port) in ONE_MACHINE:
                self._end(*ONE_MACHINE)
            self.started.pop(str(args.port), None)
            self.started[str(args.port)] = ["env", *environment, *self._here(command)]
            self._serve(str(args.port))
        else:
            short = ["--max_new_tokens", "8"] if args.role in checks.CLIENTS else []
            self.machine.run(["env", *environment, *self._here(command), *short])

    def _here(self, command: Command) -> list[str]:
        """The words that run a role on this machine."""
        words, program = self._words(command.arguments), [sys.executable, str(ROOT / "main.py")]
        if "nxdi" in words or "--device" not in words:
            return [*program, *words]
        if command.launcher[0] == "torchrun" and "compile" in words:
            _drop(words, "--tp_degree")
            for flag, value in SMALL_GRAPHS.items():
                _replace(words, flag, value)
            return [sys.executable, "-m", "tests.runners.strict_device", "/dev/null", *words]
        _replace(words, "--device", "cpu")
        if command.launcher[0] != "torchrun":
            return [*program, *words]
        _replace(words, "--tp_degree", RANKS)
        _replace(words, "--sequence_length", LENGTH)
        _drop(words, "--compiled_dir")  # its graphs are not of several processes
        launcher = [sys.executable, "-m", "torch.distributed.run", *command.launcher[1:]]
        _replace(launcher, "--nproc-per-node", RANKS)
        return [*launcher, program[1], *words]

    def _serve(self, port: str) -> None:
        """Starts the page's last server on a port, unless it runs. It serves metrics unless another server does."""
        words, here = self.started[port], int(self._port(port))
        if not any(here in server.ports for server in self.machine.servers):
            http = words[words.index("--http_port") + 1] if "--http_port" in words else 0
            if "draft_worker" not in words and not self._has_metrics():
                words = [*words, "--metrics_port", self._port(METRICS)]
            self.machine.serve(words, here, int(http))

    def _has_metrics(self) -> bool:
        return any("--metrics_port" in server.words for server in self.machine.servers)

    def _end(self, *ports: str) -> None:
        here = {int(self._port(port)) for port in ports}
        self.machine.end(*(server for server in self.machine.servers if here & set(server.ports)))

    def _compare(self, command: Command) -> None:
        words = self._words(command.arguments)
        connected = [value.rpartition(":")[2] for value in checks.values(command.arguments, "--connect")]
        if not connected:
            self.machine.end(*self.machine.servers)
        for port in connected:
            self._serve(port)
        for flag in (flag for flag in LENGTHS if flag in words):
            _replace(words, flag, "8")
        if "--output-dir" in words:
            _drop(words, "--output-dir")
        self.machine.run([sys.executable, str(ROOT / "compare_architectures.py"), *words])

    def _curl(self, command: Command) -> None:
        """Asks the server that the page started last on the port; for metrics, the one that has them."""
        words = self._words(command.words)
        if words[-1].endswith("/metrics") and not self._has_metrics():
            self._serve(next(port for port, served in self.started.items() if "draft_worker" not in served))
        output = self.machine.run(["curl", "-sS", "--fail-with-body", *words[1:]])
        if words[-1].endswith("/metrics"):
            assert "vllm:generation_tokens_total" in output
        else:
            answer = json.loads(output)
            assert answer["choices"][0]["text"] and answer["usage"]["completion_tokens"], output


def _drop(words: list[str], flag: str) -> None:
    at = words.index(flag)
    del words[at : at + 2]


def _replace(words: list[str], flag: str, value: str) -> None:
    words[words.index(flag) + 1] = value

"""A machine made up for one page: its models, its devices, its ports, and the processes that run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.ports import free_port
from tests.planning.support import CONFIGS, device, neuron_ls
from tests.recipes import models
from tests.recipes.page import ROOT

SECONDS = 600.0
RANKS = "2"
"""Processes of a torchrun command here, for the page's 8."""
LOCAL = re.compile(r"(?:[\w-]+\.internal|qwen-[a-z]+|localhost|127\.0\.0\.1)(?=:|$|/)")
HOST_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")
PORTS = ("--port", "--target_port", "--http_port", "--metrics_port", "--health_port")
MADE = ("compiled",)  # folders that commands make
STAND_IN = """
import sys
if "nxdi" in sys.orig_argv:
    sys.path.append({root!r})
    import pytest
    from tests.runners.nxdi import simulated
    simulated.install(pytest.MonkeyPatch())
"""


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    words: list[str]
    variables: dict[str, str]
    log: Path


@dataclass
class Place:
    """`folder` is where commands run. `instance`: whose devices `neuron-ls` shows."""

    folder: Path
    instance: str
    cache: Path
    servers: dict[str, Running] = field(default_factory=dict)
    seen: dict[str, Running] = field(default_factory=dict)
    ports: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("models", "site"):
            (self.folder / name).mkdir()
        (self.folder / "site" / "sitecustomize.py").write_text(STAND_IN.format(root=str(ROOT)))
        chips, cores = (1, 2) if self.instance.startswith("trn1") else (16, 4)
        neuron_ls(self.folder, says=[device(n, self.instance, cores, 96 * 2**30, None) for n in range(chips)])
        (self.folder / "prompt.txt").write_text("The history of AI\n")
        (self.folder / "docs").symlink_to(ROOT / "docs")

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            **variables,
            "PATH": f"{self.folder / 'opt/aws/neuron/bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self.folder / 'site'}{os.pathsep}{ROOT}",
            "TANDEM_CACHE": str(self.cache),
            "HF_HUB_OFFLINE": "1",
            "PET_MASTER_PORT": self.port("29500"),  # torchrun's own
        }

    def port(self, number: str) -> str:
        """The free port that stands for a page's."""
        if number not in self.ports:
            self.ports[number] = str(free_port())
        return self.ports[number]

    def words(self, page_words: Sequence[str]) -> list[str]:
        """A page's words with this machine's folders, host and ports."""
        found = []
        for before, word in zip(("", *page_words), page_words, strict=False):
            if before in PORTS:
                word = self.port(word)
            if model := re.fullmatch(r"/models/([\w.-]+)", word):
                word = str(self._model(model[1], before))
            word = word.replace('"/models/', f'"{self.folder}/models/').replace("/mnt/s3", str(self.folder))
            word = re.sub(r"\$\(cat (\S+)\)", lambda m: (self.folder / m[1]).read_text().strip(), word)
            word = LOCAL.sub("127.0.0.1", word)
            found.append(HOST_PORT.sub(lambda m: self.port(m[0]), word))
        return found

    def _model(self, name: str, flag: str) -> Path:
        folder = self.folder / "models" / name
        return folder if flag == "--output" or name in MADE else models.write(folder)

    @staticmethod
    def plan_words(page_words: Sequence[str]) -> list[str]:
        """A plan reads the public models' own config.json."""
        return [re.sub(r"^/models/", f"{CONFIGS}/", word) for word in page_words]

    def run(self, words: Sequence[str], variables: dict[str, str]) -> str:
        """Runs a command to its end. Raises AssertionError with what it said if it fails."""
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment(variables),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def serve(self, words: list[str], variables: dict[str, str], port: str) -> None:
        """Starts a server, in place of one on the same port, and waits until it is ready."""
        self.end(port)
        ready, log = self.folder / f"ready-{port}", self.folder / f"log-{port}"
        ready.unlink(missing_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*words, "--ready_file", str(ready)],
                cwd=self.folder,
                env=self.environment(variables),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.servers[port] = self.seen[port] = Running(process, words, variables, log)
        give_up = time.monotonic() + SECONDS
        while not (ready.exists() and json.loads(ready.read_text() or "null")):
            if process.poll() is not None or time.monotonic() > give_up:
                self._kill(self.servers.pop(port))
                raise AssertionError(log.read_text()[-4000:])
            time.sleep(0.05)

    def serve_again(self, port: str) -> None:
        """Starts the page's last server on a port once more, if it does not run."""
        if port not in self.servers:
            assert port in self.seen, f"no server of the page was on the port that is {port} here"
            self.serve(self.seen[port].words, self.seen[port].variables, port)

    def end(self, *ports: str) -> None:
        """Ends the servers on these ports, or all. Raises AssertionError where one ends otherwise than it should."""
        for port in ports or tuple(reversed(self.servers)):
            if (running := self.servers.pop(port, None)) is not None:
                os.kill(json.loads((self.folder / f"ready-{port}").read_text())["pid"], signal.SIGTERM)  # rank 0
                code = running.process.wait(90)
                assert code == 0, f"ended with {code}: {running.log.read_text()[-3000:]}"

    def kill(self) -> None:
        """Kills what is left, with what it started."""
        for port in tuple(self.servers):
            self._kill(self.servers.pop(port))

    @staticmethod
    def _kill(running: Running) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()

"""Walks recipe pages: runs every command that can run here, and checks the others; none is passed over.

    python -m tests.recipes.walk [PAGE...]            # default: all pages
    python -m tests.recipes.walk --check [PAGE...]    # runs nothing

Prints each command with `ran` or `checked`, and how; exits with 1 if a command is neither. What stands in for what:

- a device: `--device cpu`, 2 processes under torchrun for the page's 8; to compile, one process of
  tests/runners/strict_device.py and `SMALL_GRAPHS`;
- NxD Inference: its stand-in of tests/runners/nxdi;
- models: small ones with a tokenizer over bytes; plans read the public models' own config.json;
- other hosts: this one, on free ports. A comparison generates 8 tokens a request.

Servers, clients, curl and comparisons are processes of their own, as the page has them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.cli import main as cli
from tests.recipes import ours, programs
from tests.recipes.page import PAGES, ROOT, Command, commands_of
from tests.recipes.place import RANKS, Place

ONE_MACHINE = ("50051", "50053")
"""Ports of servers that a page starts in turn on the same cores."""
SMALL_GRAPHS = {"--batch": "1", "--sequence_length": "128", "--speculation_length": "1"}
"""What is compiled here: a step takes seconds, and a page's own sizes make dozens of them."""
LENGTHS = ("--max-new-tokens", "--mean-input-tokens", "--mean-output-tokens", "--max-num-completed-requests")


@dataclass(frozen=True)
class Step:
    """What became of a command: `verdict` is ran, checked, or failed."""

    command: Command
    verdict: str
    how: str
    seconds: float


def walk(page: Path, place: Place | None) -> Iterator[Step]:
    """Walks a page's commands in order; without a place it only checks them."""
    try:
        for command in commands_of(page):
            began = time.monotonic()
            try:
                verdict, how = _step(command, place) if place else ("checked", _checked(command))
            except (Exception, SystemExit) as error:
                verdict, how = "failed", f"{type(error).__name__}: {error}"
            yield Step(command, verdict, how, time.monotonic() - began)
        if place:
            place.end()
    finally:
        if place:
            place.kill()


def _checked(command: Command) -> str:
    if not command.program.endswith(".py"):
        return programs.check(command.words)
    with pytest.MonkeyPatch.context() as patch:
        return ours.check(command, patch)


def _step(command: Command, place: Place) -> tuple[str, str]:
    how = _checked(command)
    if command.program == "curl":
        return ("ran", _curl(command, place)) if shutil.which("curl") else ("checked", f"{how}; there is no curl here")
    if command.program == "sh":
        place.run(["sh", str(ROOT / command.words[1]), *command.words[2:]], {})
        return "ran", "as written"
    if not command.program.endswith(".py"):
        return "checked", how
    if command.program == "compare_architectures.py":
        return "ran", _compare(command, place)
    return "ran", _role(command, place)


def _role(command: Command, place: Place) -> str:
    args = cli.parser().parse_args(command.arguments)
    if args.role == "plan":
        words = [sys.executable, str(ROOT / "main.py"), *place.plan_words(command.arguments)]
        place.run(words, command.variables)
        return "on the public models' config.json"
    words, how = _here(command, place)
    if args.role in ours.SERVERS:
        if str(args.port) in ONE_MACHINE:
            place.end(*(place.port(port) for port in ONE_MACHINE))
        place.serve(words, command.variables, place.port(str(args.port)))
        return f"started, ready; {how}"
    place.run(words, command.variables)
    return how


def _here(command: Command, place: Place) -> tuple[list[str], str]:
    """The words that run a role on this machine, and what stands in for what."""
    words = place.words(command.arguments)
    if "nxdi" in words:
        return [sys.executable, str(ROOT / "main.py"), *words], "stand-in for NxD Inference"
    if "--device" not in words:
        return [sys.executable, str(ROOT / "main.py"), *words], "as written"
    program = str(ROOT / "main.py")
    if command.launcher[0] == "torchrun" and "compile" in words:
        _drop(words, "--tp_degree")
        for flag, value in SMALL_GRAPHS.items():
            _replace(words, flag, value)
        return [sys.executable, "-m", "tests.runners.strict_device", "/dev/null", *words], f"stand-in, {SMALL_GRAPHS}"
    _replace(words, "--device", "cpu")
    if command.launcher[0] != "torchrun":
        return [sys.executable, program, *words], "--device cpu"
    _replace(words, "--tp_degree", RANKS)
    _drop(words, "--compiled_dir")  # its graphs are not of several processes
    launcher = [sys.executable, "-m", "torch.distributed.run", *command.launcher[1:]]
    _replace(launcher, "--nproc-per-node", RANKS)
    return [*launcher, program, *words], f"--device cpu, {RANKS} processes, no --compiled_dir"


def _drop(words: list[str], flag: str) -> None:
    at = words.index(flag)
    del words[at : at + 2]


def _replace(words: list[str], flag: str, value: str) -> None:
    words[words.index(flag) + 1] = value


def _compare(command: Command, place: Place) -> str:
    words = place.words(command.arguments)
    connected = [value.rpartition(":")[2] for value in programs.values(words, "--connect")]
    if connected:
        for port in connected:
            place.serve_again(port)
    else:
        place.end()
    for flag in (flag for flag in LENGTHS if flag in words):
        _replace(words, flag, "8")
    results = place.folder / "results" / str(time.monotonic_ns())
    if "--output-dir" in words:
        _replace(words, "--output-dir", str(results))
    else:
        words += ["--output-dir", str(results)]
    place.run([sys.executable, str(ROOT / "compare_architectures.py"), *words], command.variables)
    (report,) = results.rglob("comparison.json")
    (asked,) = programs.values(words, "--architectures")
    measured = report.read_text(encoding="utf-8")
    assert all(f'"{name}"' in measured for name in asked.split(",")), report
    json.loads(measured)
    return f"8 tokens a request, {len(connected)} servers of the page" if connected else "8 tokens a request"


def _curl(command: Command, place: Place) -> str:
    words = place.words(command.words)
    url = next(word for word in words if word.startswith("http"))
    how = "at the port of the page's last server"
    if url.endswith("/metrics"):
        how = _with_metrics(place, url.removesuffix("/metrics").rpartition(":")[2])
    said = place.run(["curl", "-sS", "--fail-with-body", *words[1:]], {})
    if url.endswith("/metrics"):
        assert "vllm:generation_tokens_total" in said
    else:
        answer = json.loads(said)
        assert answer["choices"][0]["text"] and answer["usage"]["completion_tokens"], said
    return how


def _with_metrics(place: Place, port: str) -> str:
    """Starts the page's last server of a target once more, with the flag that the page names beside the command."""
    served, role, running = next(
        (port, words[words.index("--role") + 1], each)
        for port, each in reversed(place.seen.items())
        if {"target", "fused_target"} & set(words := each.words)
    )
    place.end()
    place.serve([*running.words, "--metrics_port", port], running.variables, served)
    return f"from the page's last {role}, with --metrics_port"


def main() -> int:
    parser = argparse.ArgumentParser(description="Walks recipe pages.")
    parser.add_argument("--check", action="store_true", help="run nothing")
    parser.add_argument("pages", nargs="*", type=Path)
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        for page in args.pages or PAGES:
            print(f"\n{page.name}", flush=True)
            place = None if args.check else place_of(page, Path(made))
            for step in walk(page, place):
                failed += step.verdict not in ("ran", "checked")
                print(f"{step.verdict:8}{step.seconds:6.1f} s  {step.command.line[:110]}", flush=True)
                print(f"{'':18}{step.how}", flush=True)
    print(f"\n{failed} commands are neither run nor checked" if failed else "\nevery command was run or checked")
    return 1 if failed else 0


def place_of(page: Path, folder: Path) -> Place:
    own = folder / page.stem
    own.mkdir()
    return Place(own, "trn1.2xlarge" if "trn1" in page.stem else "trn2.48xlarge", folder / "cache")


if __name__ == "__main__":
    sys.exit(main())

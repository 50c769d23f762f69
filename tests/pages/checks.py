"""Checks of a page's command without running it: of our programs the flags, of others the files and objects of ours."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import runpy
import shlex
from typing import TYPE_CHECKING

import pytest

from tandem.cli import asking, compare, main, models, tools
from tandem.cli.command_line import RoleParser
from tandem.comparison.measuring.commands import beside_command, target_command, worker_command
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.host.devices import Devices
from tandem.host.instances import family_of, instance_named
from tandem.launch import LAUNCH
from tandem.workshops.ray_serve.application import parser
from tests.pages.commands import RECIPES, ROOT, Command
from tests.planning.support import CONFIGS

if TYPE_CHECKING:
    from tandem_nxdi.shapes import Build

LENGTH = 512  # of a server whose command names none
SERVERS = ("target", "fused_target", "draft_worker")
CLIENTS = ("client", "fused_client", "draft", "verify_target", "verify_draft")
SEEDS = ROOT / "docs" / "seeds.md"
FIRST_HOUR = ROOT / "deploy" / "first-hour" / "README.md"
ON_AN_INSTANCE = (*RECIPES, SEEDS, FIRST_HOUR)
OTHERS = (
    *("aws", "docker", "echo", "eksctl", "export", "git", "helm", "hf", "kubectl", "make", "neuron-top", "pip", "pipx"),
    *("pre-commit", "ray", "sh", "source", "ssh", "sudo", "tar", "tmux", "vllm"),
)
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics")
FIELDS = {"model", "prompt", "messages", "max_tokens", "temperature", "stream"}


def check(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises AssertionError, SystemExit or ValueError for a wrong command."""
    monkeypatch.chdir(ROOT)
    words = command.words
    if words[0] == "docker" and "main.py" in words:
        at = next(i for i, word in enumerate(words) if word.startswith("tandem:"))
        check(Command(command.page, shlex.join(words[at + 1 :])), monkeypatch)
    elif command.program == "main.py":
        _role(command.launcher, command.arguments, monkeypatch)
    elif words[:2] == ["tandem", "compare"]:
        compare.build_parser().parse_args(words[2:])
    elif words[0] == "tandem":
        _role(["python"], words[1:], monkeypatch)
    elif command.program == "compare_architectures.py" and command.page in ON_AN_INSTANCE:
        for arguments in compared_servers(command, monkeypatch):
            _configured(RoleParser().parse_args(arguments))
    elif command.program == "compare_architectures.py":
        compare.build_parser().parse_args(command.arguments)
    elif words[0].endswith("python"):
        _script(words[1:], monkeypatch)
    else:
        _other(words)


def _role(launcher: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args = RoleParser().parse_args(main.with_role(words))
    if launcher[0] == "torchrun":
        processes = launcher[launcher.index("--nproc-per-node") + 1]
        assert int(processes) == args.tp_degree
        monkeypatch.setenv("WORLD_SIZE", processes)
        monkeypatch.setenv("RANK", "0")
    else:
        assert launcher == ["python"], launcher
    if args.role in SERVERS or args.role == "compile":
        _configured(args)
    elif args.role in CLIENTS and (args.prompt or args.prompt_text) and not args.tls_ca:
        asking.client_config(args)


def compared_servers(command: Command, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the servers that a comparison of a page starts on the page's instance."""
    instance = instance_named(command.instance)
    chips = Devices(count=instance.chips, instance=instance.name, family=family_of(instance.name))
    monkeypatch.setattr(compare, "find_devices", lambda *where: chips)
    arguments = [re.sub(r"^/models/(?=[LQ])", f"{CONFIGS}/", word) for word in command.arguments]
    return server_commands(compare.build_config(compare.build_parser().parse_args(arguments)))


def server_commands(config: ComparisonConfig) -> list[list[str]]:
    """The arguments of the servers that a comparison starts here."""
    started = set(config.architectures) - set(config.connect)
    commands = [target_command(config)] if "autoregressive" in started else []
    commands += [beside_command(config, "fused")] if "fused" in started else []
    if "distributed" in started:
        commands += [target_command(config, ("distributed",)), worker_command(config, "distributed", "127.0.0.1:1")]
    return [command[len(LAUNCH) :] for command in commands]


def _configured(args: argparse.Namespace) -> None:
    try:
        if args.role == "compile":
            tools.compile_config(args)
        else:
            models.model_config(args, args.target_model or args.model)
    except ValueError as error:
        assert "is not available here" in str(error)
    if args.backend == "nxdi":
        assert nxdi_build(args).max_length > (args.sequence_length or LENGTH) - 2 * (args.most_drafts + 1)


def nxdi_build(args: argparse.Namespace) -> Build:
    """The build that --backend nxdi would compile or load, with the checks that it makes before."""
    from tandem.runners.load_runner import Shape
    from tandem_nxdi.shapes import kind_of, plan_build

    shape = Shape(args.batch, args.sequence_length or LENGTH, args.most_drafts)
    part = args.compile_for or args.role
    kind = kind_of(part.startswith("fused"), not part.startswith("draft"), shape)
    dtype = None if args.dtype == "auto" else args.dtype
    return plan_build(kind, shape, models.nxdi_settings(args, shape), dtype)


def _script(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """python FILE, -m MODULE or -c PROGRAM: a file or module of this repository, or a package's."""
    if words[:2] == ["-m", "tandem.workshops.ray_serve.application"]:
        assert RoleParser().parse_args(parser().parse_args(words[2:]).flags).role
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words[1]
    elif words[0] == "deploy/first-hour/first_hour.py":
        monkeypatch.syspath_prepend(str(FIRST_HOUR.parent))
        runpy.run_path(words[0])["parse"](words[1:])
    else:
        assert words[0] == "-c" or (ROOT / words[0]).is_file(), words[0]


def _other(words: list[str]) -> None:
    if "|" in words:
        at = words.index("|")
        _other(words[:at])
        return _other(words[at + 1 :])
    if words[0] == "curl":
        return _curl(words[1:])
    assert words[0] in OTHERS, f"unknown command: {' '.join(words)}"
    files = [file for flag in ("-f", "-r", "-c") for file in values(words, flag)] + words[1 : 2 * (words[0] == "sh")]
    files += [f"{folder}/kustomization.yaml" for folder in values(words, "-k")]
    assert all((ROOT / file).is_file() for file in files), files
    return None


def values(words: list[str], flag: str) -> list[str]:
    """The values of a flag, given as `--flag value` or `--flag=value`."""
    apart = [value for word, value in itertools.pairwise(words) if word == flag]
    return apart + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]


def _curl(words: list[str]) -> None:
    url = next(word for word in words if re.match("https?://", word))
    assert "/" + url.partition("//")[2].partition("/")[2] in ROUTES, url
    assert ("--cacert" in words) == url.startswith("https:")
    if "-d" in words:
        assert {*json.loads(words[words.index("-d") + 1])} <= FIELDS
        assert words[words.index("-H") + 1].lower() == "content-type: application/json"

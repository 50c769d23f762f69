"""Parses and configures our own commands of a page, as far as a machine without the device can."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

import pytest

from tandem.cli import asking, compare, main, models, tools
from tandem.comparison.measuring.commands import beside_command, target_command, worker_command
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.host.devices import Devices
from tandem.host.instances import family_of, instance_named
from tandem.launch import LAUNCH
from tests.planning.support import CONFIGS
from tests.recipes.page import ROOT, Command

if TYPE_CHECKING:
    from tandem_nxdi.build import Build

SERVERS = ("target", "fused_target", "draft_worker")


def check(command: Command, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns how it was checked. Raises AssertionError, SystemExit or ValueError for a wrong command."""
    monkeypatch.chdir(ROOT)
    if command.program == "compare_architectures.py":
        _comparison(command, monkeypatch)
        return "parsed and configured, and so is each server that it starts"
    assert command.launcher[0] in ("python", "torchrun"), command.line
    args = main.parser().parse_args(command.arguments)
    if command.launcher[0] == "torchrun":
        processes = command.launcher[command.launcher.index("--nproc-per-node") + 1]
        assert int(processes) == args.tp_degree
        monkeypatch.setenv("WORLD_SIZE", processes)
        monkeypatch.setenv("RANK", "0")
    if args.role in SERVERS or args.role == "compile":
        _configured(args)
        return "parsed and configured"
    if getattr(args, "prompt", None) or getattr(args, "prompt_text", None):
        asking.client_config(args)
        return "parsed and configured"
    assert args.role in ("accept", "doctor", "plan", "convert"), args.role
    return "parsed"


def _comparison(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in compared_servers(command, monkeypatch):
        _configured(main.parser().parse_args(words))


def compared_servers(command: Command, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the servers that a comparison of a page starts on the page's instance."""
    instance = instance_named(command.instance)
    chips = Devices(count=instance.chips, instance=instance.name, family=family_of(instance.name))
    monkeypatch.setattr(compare, "find_devices", lambda *where: chips)
    arguments = [re.sub(r"^/models/(?=[LQ])", f"{CONFIGS}/", word) for word in command.arguments]
    return _server_commands(compare.build_config(compare.build_parser().parse_args(arguments)))


def _server_commands(config: ComparisonConfig) -> list[list[str]]:
    """Returns the arguments of the servers that a comparison starts here."""
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
        assert nxdi_build(args).max_length > args.sequence_length - 2 * (args.most_drafts + 1)


def nxdi_build(args: argparse.Namespace) -> Build:
    """What --backend nxdi would compile or load: runs the checks that it makes before."""
    from tandem_nxdi.build import BuildRequest, Kind, plan_build

    settings, k = models.nxdi_settings(args), args.most_drafts
    part = args.compile_for or args.role
    kind = {"fused_target": Kind.FUSED, "fused": Kind.FUSED, "draft_worker": Kind.PLAIN, "draft": Kind.PLAIN}.get(
        part, Kind.WINDOW if k else Kind.PLAIN
    )
    dtype = None if args.dtype == "auto" else args.dtype
    return plan_build(BuildRequest(kind, args.batch, args.sequence_length, k, dtype), settings)

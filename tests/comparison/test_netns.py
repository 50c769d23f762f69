"""The link through a network namespace. What needs root, or netem in the kernel, is skipped with what was missing."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tandem.comparison.links.netns
from tandem.comparison.links.netns import NetnsLink, netem
from tandem.comparison.links.overhead import Echo, round_trips
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.servers import Fleet
from tandem.rpc.generation_client import GenerationClient
from tests.support import HANG
from tests.timing import ROOM

MAIN = Path(__file__).resolve().parents[2] / "main.py"


def why_not(discipline: list[str] | None) -> str:
    """What this machine lacks for a NetnsLink, with `discipline` in netem's place where one is given."""

    async def enter() -> None:
        async with NetnsLink():
            pass

    with pytest.MonkeyPatch.context() as patch:
        if discipline:
            patch.setattr(tandem.comparison.links.netns, "netem", lambda settings: discipline)
        try:
            asyncio.run(enter())
        except ValueError as error:
            return str(error)
    return ""


TBF = ["tbf", "rate", "1gbit", "burst", "100kb", "limit", "10mb"]


@pytest.fixture(scope="module")
def needs_netem() -> None:
    if reason := why_not(None):
        pytest.skip(reason)


@pytest.fixture
def without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespace, veth pair and addresses are real; a discipline that more kernels have takes netem's place."""
    if reason := why_not(TBF):
        pytest.skip(reason)
    monkeypatch.setattr(tandem.comparison.links.netns, "netem", lambda settings: TBF)


def left_over() -> str:
    found = [subprocess.run(["ip", *what], capture_output=True, text=True).stdout for what in (["netns"], ["link"])]
    return "\n".join(
        line for line in "".join(found).splitlines() if f"-{os.getpid()}-" in line or f"td{os.getpid()}" in line
    )


# --- everywhere ---


def test_settings_in_the_words_of_tc():
    assert netem(LinkSettings(25)) == ["netem", "limit", "100000", "delay", "12500us"]
    assert netem(LinkSettings(0, 0.5)) == ["netem", "limit", "100000", "delay", "0us", "rate", "500000bit"]


def test_who_is_not_root_is_told_so_in_one_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not(None) == "link: netns needs root and iproute2 with netem: not running as root"


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert why_not(None) == "link: netns needs root and iproute2 with netem: there is no `tc`"


def test_a_kernel_without_the_discipline_is_told_and_nothing_is_left(without_delay):
    reason = why_not(["nosuch"])
    assert reason.startswith("link: netns needs root and iproute2 with netem: `tc qdisc replace dev td")
    assert "\n" not in reason
    assert left_over() == ""


# --- with namespaces ---


def test_a_server_in_the_namespace_answers_and_nothing_is_left_behind(without_delay, tmp_path):
    async def run() -> None:
        async with NetnsLink() as link:
            assert left_over() != ""
            async with Fleet(tmp_path) as fleet:
                command = [*link.command_prefix, sys.executable, str(MAIN), "--role", "target", "--backend", "toy"]
                server = await fleet.start("toy", [*command, "--host", link.host, "--port", "0", "--insecure"])
                assert server.host == link.host
                assert await link.listen(server.address) == server.address
                async with GenerationClient.connect(server.address, "TargetVerifier") as client:
                    assert (await client.model_info()).backend == "toy"
            assert server.process.returncode is not None

    asyncio.run(run())
    assert left_over() == ""


def test_two_links_at_once_are_apart_and_both_removed_after_an_error(without_delay):
    async def run() -> None:
        async with NetnsLink() as one, NetnsLink() as other:
            assert one.host != other.host
            assert one.command_prefix != other.command_prefix
            async with Echo(one.host, one.command_prefix) as first, Echo(other.host, other.command_prefix) as second:
                round_trips([first.address, second.address], 3, 0.001)
                raise KeyError("on purpose")

    with pytest.raises(KeyError):
        asyncio.run(run())
    assert left_over() == ""


def test_what_a_killed_comparison_left_is_removed_by_the_next_and_what_runs_is_kept(without_delay):
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale, running = f"tandem-{ended.pid}-0", f"tandem-{os.getppid()}-99"
    for name in (stale, running):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        assert why_not(TBF) == ""
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert stale not in names
        assert running in names
    finally:
        subprocess.run(["ip", "netns", "delete", running], check=True)


def test_the_kernel_delays_by_what_the_link_is_set_to_now(needs_netem):
    async def run() -> None:
        async with NetnsLink() as link:
            for settings in (LinkSettings(20), LinkSettings(50, 100), LinkSettings(5)):
                await link.set(settings)
                give_up, median = time.monotonic() + HANG, HANG
                while median >= settings.rtt_ms / 1000 + ROOM:  # load delays some measurements, a fault all of them
                    assert time.monotonic() < give_up
                    median = (await link.overhead(samples=20)).link_p50_s
                    assert settings.rtt_ms / 1000 <= median

    asyncio.run(run())
    assert left_over() == ""

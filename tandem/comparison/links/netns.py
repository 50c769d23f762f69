"""Emulates a link in the kernel: a network namespace behind a veth pair with netem. Needs root and iproute2.

Servers run inside the namespace (`command_prefix`), whose addresses clients outside it reach, with real TCP between
them: handshake, congestion window, segments. When the delay shrinks, later packets may overtake earlier ones, and TCP
reorders them. Removing a bandwidth limit drops the queued packets.

Names contain the process id. A comparison removes what an earlier, killed one left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil

from tandem.comparison.links.link import Link
from tandem.comparison.links.overhead import Echo
from tandem.comparison.links.settings import LinkSettings

NEEDS = "link: netns needs root and iproute2 with netem"
PACKETS = 100_000
"""The capacity of a netem queue, 150 MB of full packets: a full queue would drop packets."""
SUBNETS = 2**15
"""The number of subnets of four addresses in 198.18.0.0/15, which RFC 2544 reserves for benchmarks."""

_numbers = itertools.count()


class NetnsLink(Link):
    """A link in the kernel. Can be entered once; raises a one-line ValueError if this machine does not support it.

    Stop the servers before leaving it: a namespace lives until its last process has exited.
    """

    def __init__(self) -> None:
        super().__init__()
        number = next(_numbers)
        self._namespace = f"tandem-{os.getpid()}-{number}"
        self._near, self._far = f"td{os.getpid()}n{number}", f"td{os.getpid()}f{number}"
        self.command_prefix = ("ip", "netns", "exec", self._namespace)

    async def __aenter__(self) -> NetnsLink:
        _check_tools()
        try:
            await self._remove_what_others_left()
            self._stack.push_async_callback(self._remove, self._namespace, self._near)
            await self._build()
            await self.set(self.settings)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _build(self) -> None:
        self.near_host, self.host = await self._free_addresses()
        inside = ("ip", "-n", self._namespace)
        await must("ip", "netns", "add", self._namespace)
        await self._join()
        await must("ip", "address", "add", f"{self.near_host}/30", "dev", self._near)
        await must(*inside, "address", "add", f"{self.host}/30", "dev", self._far)
        await must("ip", "link", "set", self._near, "up")
        await must(*inside, "link", "set", self._far, "up")
        await must(*inside, "link", "set", "lo", "up")

    async def _join(self) -> None:
        """Creates the two ends."""
        await must(*f"ip link add {self._near} type veth peer name {self._far} netns {self._namespace}".split())

    async def _free_addresses(self) -> tuple[str, str]:
        _, taken = await _run("ip", "-4", "-oneline", "address")
        for number in range(SUBNETS):
            first = 4 * ((os.getpid() + number) % SUBNETS) + 1
            near, far = (f"198.{18 + (n >> 16)}.{n >> 8 & 255}.{n & 255}" for n in (first, first + 1))
            if f" {near}/" not in taken:
                return near, far
        raise ValueError(f"{NEEDS}: no free subnet in 198.18.0.0/15")

    async def _remove(self, namespace: str, near: str) -> None:
        """Deletes the veth pair by name too, because a process in the namespace keeps its end alive."""
        await _run("ip", "link", "delete", near)
        await _run("ip", "netns", "delete", namespace)

    async def _remove_what_others_left(self) -> None:
        _, listed = await _run("ip", "netns", "list")
        for name, pid, number in re.findall(r"^(tandem-(\d+)-(\d+))\b", listed, re.MULTILINE):
            if not _is_running(int(pid)):
                await self._remove(name, f"td{pid}n{number}")

    async def set(self, settings: LinkSettings) -> None:
        """Changes the settings, also for open connections. Raises ValueError if the kernel lacks netem."""
        unlimited = self.settings.bandwidth_mbps is not None and settings.bandwidth_mbps is None
        for tc, device in ((("tc",), self._near), (("tc", "-n", self._namespace), self._far)):
            if unlimited:  # a change without a rate would keep the old rate
                await must(*tc, "qdisc", "delete", "dev", device, "root")
            await must(*tc, "qdisc", "replace", "dev", device, "root", *netem(settings))
        self.settings = settings

    async def _across(self, plain: Echo) -> str:
        """Starts another echo process, in the namespace."""
        return (await self._stack.enter_async_context(Echo(self.host, self.command_prefix))).address


def netem(settings: LinkSettings) -> list[str]:
    """Returns the arguments of tc for one end's queueing discipline."""
    rate = [] if settings.bandwidth_mbps is None else ["rate", f"{round(settings.bandwidth_mbps * 1e6)}bit"]
    return ["netem", "limit", str(PACKETS), "delay", f"{round(500_000 * settings.seconds)}us", *rate]


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise ValueError(f"{NEEDS}: not running as root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ValueError(f"{NEEDS}: there is no `{tool}`")


async def must(*command: str) -> None:
    code, said = await _run(*command)
    if code:
        raise ValueError(f"{NEEDS}: `{' '.join(command)}` says: {' '.join(said.split())}")


async def _run(*command: str) -> tuple[int, str]:
    """Runs a command and returns its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        written, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return process.returncode or 0, written.decode(errors="replace")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True

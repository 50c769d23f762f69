"""Compares the emulated link with the kernel's TCP over a delay.

`python -m benchmarks.link_agreement`. Small messages, unary gRPC calls to a server of the toy runner, and transfers
over a link with a bandwidth: on a connection that has been in use, where the two should agree, and on a new one, where
TCP's congestion window counts, which the emulated link does not have.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.keeping import kept
from benchmarks.packet_link import PacketLink
from tandem.comparison.links.echo import message, receive
from tandem.comparison.links.link import DelayLink, Link
from tandem.comparison.links.netns import NetnsLink
from tandem.comparison.links.overhead import Echo, round_trips, spacing_for
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.servers import Fleet
from tandem.launch import LAUNCH
from tandem.rpc.generation_client import GenerationClient

ALLOWED = 0.05
REPLY_BYTES = 64
WARM_UP_CALLS = 3
WARM_UP_TRANSFERS = 3
TRANSFERS = 5

EMULATED, NETNS, PACKETS = "emulated", "netns", "packets"
MESSAGES, CALLS, WARM, COLD = "64 B messages", "gRPC GetModelInfo", "transfer", "transfer, new connection"


@dataclass(frozen=True, slots=True)
class Figure:
    """Measurements over one link, in seconds. `expected_s` follows from the settings alone, without direct cost."""

    link: str
    rtt_ms: float
    what: str
    p50_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A figure of the emulated link and the kernel's; `of_kernel` is the difference as a share of the latter."""

    rtt_ms: float
    what: str
    emulated_s: float
    kernel_s: float

    @property
    def of_kernel(self) -> float:
        return self.emulated_s / self.kernel_s - 1


def disagreements(figures: Sequence[Figure]) -> list[Disagreement]:
    """Compares everything measured over the emulated link and over one other."""
    kernel = {(f.rtt_ms, f.what): f.p50_s for f in figures if f.link != EMULATED}
    emulated = (f for f in figures if f.link == EMULATED and (f.rtt_ms, f.what) in kernel)
    return [Disagreement(f.rtt_ms, f.what, f.p50_s, kernel[f.rtt_ms, f.what]) for f in emulated]


@dataclass(frozen=True, slots=True)
class Side:
    """A link with a gRPC server and an echo process at its far end."""

    name: str
    link: Link
    client: GenerationClient
    echo: str


async def open_side(stack: AsyncExitStack, name: str, link: Link) -> Side:
    logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="link_agreement"))
    fleet = await stack.enter_async_context(Fleet(Path(logs)))
    command = [*link.command_prefix, *LAUNCH, "--role", "target", "--backend", "toy"]
    server = await fleet.start("toy", [*command, "--host", link.host, "--port", "0", "--insecure"])
    echo = await stack.enter_async_context(Echo(link.host, link.command_prefix))
    address = await link.listen(server.address)
    client = await stack.enter_async_context(GenerationClient.connect(address, "TargetVerifier"))
    return Side(name, link, client, await link.listen(echo.address))


class Transfers:
    """Times transfers over one new connection, each answered by 64 bytes. Blocks."""

    def __init__(self, address: str, size: int) -> None:
        host, _, port = address.rpartition(":")
        self._message = message(size, REPLY_BYTES)
        self.sock = socket.create_connection((host, int(port)), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.sendall(message(REPLY_BYTES, REPLY_BYTES))
        receive(self.sock, REPLY_BYTES)

    def one(self) -> float:
        """Makes one transfer; returns its seconds."""
        began = time.perf_counter()
        self.sock.sendall(self._message)
        receive(self.sock, REPLY_BYTES)
        return time.perf_counter() - began


def transfer_seconds(addresses: Sequence[str], size: int) -> list[list[float]]:
    """Times transfers to every address in turn. Blocks."""
    with ExitStack() as stack:
        connections = [Transfers(address, size) for address in addresses]
        for connection in connections:
            stack.enter_context(connection.sock)
        rounds = [[connection.one() for connection in connections] for _ in range(1 + WARM_UP_TRANSFERS + TRANSFERS)]
    return [list(column) for column in zip(*rounds, strict=True)]


async def call_seconds(clients: Sequence[GenerationClient], count: int) -> list[list[float]]:
    """Times calls to every client's server in turn."""
    timed: list[list[float]] = [[] for _ in clients]
    for _ in range(count + WARM_UP_CALLS):
        for client, seconds in zip(clients, timed, strict=True):
            began = time.perf_counter()
            await client.model_info(timeout=60)
            seconds.append(time.perf_counter() - began)
    return [seconds[WARM_UP_CALLS:] for seconds in timed]


async def measure(sides: Sequence[Side], rtt_ms: float, args: argparse.Namespace) -> list[Figure]:
    """Measures everything at one round-trip time, with the links in turn, so that drift affects them alike."""
    settings, limited = LinkSettings(rtt_ms), LinkSettings(rtt_ms, args.bandwidth_mbps)
    echoes = [side.echo for side in sides]
    for side in sides:
        await side.link.set(settings)
    nominal = settings.with_headers()
    messages = await asyncio.to_thread(round_trips, echoes, args.samples, spacing_for(nominal))
    calls = await call_seconds([side.client for side in sides], args.calls)
    for side in sides:
        await side.link.set(limited)
    transfers = await asyncio.to_thread(transfer_seconds, echoes, args.bytes)
    expected = limited.with_headers(args.bytes, REPLY_BYTES)
    figures: list[Figure] = []
    for side, sent, called, (cold, *later) in zip(sides, messages, calls, transfers, strict=True):
        figures += [
            Figure(side.name, rtt_ms, MESSAGES, statistics.median(sent), nominal),
            Figure(side.name, rtt_ms, CALLS, statistics.median(called), nominal),
            Figure(side.name, rtt_ms, WARM, statistics.median(later[WARM_UP_TRANSFERS:]), expected),
            Figure(side.name, rtt_ms, COLD, cold, expected),
        ]
    return figures


async def kernel_link(stack: AsyncExitStack, refused: list[str]) -> tuple[str, Link] | None:
    """Opens the first link that this machine supports; `refused` gets the reasons for the others."""
    for name, kind in ((NETNS, NetnsLink), (PACKETS, PacketLink)):
        try:
            return name, await stack.enter_async_context(kind())
        except (ValueError, RuntimeError) as error:
            refused.append(f"{name}: {error}")
    return None


async def measure_all(
    args: argparse.Namespace, say: Callable[[str], None], figures: list[Figure], refused: list[str]
) -> None:
    """Adds figures as they are measured, and the reasons why other links were refused."""
    async with AsyncExitStack() as stack:
        links: list[tuple[str, Link]] = [(EMULATED, await stack.enter_async_context(DelayLink()))]
        if kernel := await kernel_link(stack, refused):
            links.append(kernel)
        sides = [await open_side(stack, name, link) for name, link in links]
        for rtt_ms in args.rtt_ms:
            say(f"RTT {rtt_ms:g} ms over {' and '.join(name for name, _ in links)}")
            figures += await measure(sides, rtt_ms, args)


def table_of_figures(figures: Sequence[Figure]) -> Table:
    table = Table(title="Each link against what it is set to", title_justify="left")
    for column in ("link", "RTT ms", "what"):
        table.add_column(column)
    for column in ("median ms", "set to, ms", "more, ms", "more"):
        table.add_column(column, justify="right")
    for f in figures:
        more = f.p50_s - f.expected_s
        cells = (
            f"{f.p50_s * 1e3:.3f}",
            f"{f.expected_s * 1e3:.3f}",
            f"{more * 1e3:+.3f}",
            f"{more / f.expected_s:+.1%}",
        )
        table.add_row(f.link, f"{f.rtt_ms:g}", f.what, *cells)
    return table


def table_of_disagreements(found: Sequence[Disagreement], kernel: str) -> Table:
    table = Table(title=f"The emulated link against {kernel}", title_justify="left")
    for column in ("RTT ms", "what"):
        table.add_column(column)
    for column in ("emulated ms", f"{kernel} ms", "difference", f"within {ALLOWED:.0%}"):
        table.add_column(column, justify="right")
    for d in found:
        within = "yes" if abs(d.of_kernel) <= ALLOWED else "no"
        cells = (f"{d.emulated_s * 1e3:.3f}", f"{d.kernel_s * 1e3:.3f}", f"{d.of_kernel:+.2%}", within)
        table.add_row(f"{d.rtt_ms:g}", d.what, *cells)
    return table


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="link_agreement", description=__doc__, allow_abbrev=False)
    parser.flag("--rtt-ms", type=rtts, default=[5.0, 20.0, 50.0, 100.0], metavar="MS,MS", help="(default: 5,20,50,100)")
    parser.flag("--bandwidth-mbps", type=float, default=50.0, metavar="B", help="of the transfers (default: 50)")
    parser.flag("--bytes", type=positive, default=1_000_000, metavar="N", help="a transfer (default: 1000000)")
    parser.flag("--samples", type=positive, default=200, metavar="N", help="messages (default: 200)")
    parser.flag("--calls", type=positive, default=40, metavar="N", help="gRPC calls (default: 40)")
    parser.flag("--output", type=Path, default=Path("results/link_agreement.json"), help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        for rtt_ms in args.rtt_ms:
            LinkSettings(rtt_ms, args.bandwidth_mbps).check()
    except ValueError as error:
        parser.error(f"--{error}")
    return args


def rtts(text: str) -> list[float]:
    """Parses comma-separated milliseconds above 0."""
    found = [float(part) for part in text.split(",")]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"{min(found):g} is not above 0: nothing is to be measured")
    return found


def document(args: argparse.Namespace, figures: Sequence[Figure], refused: Sequence[str]) -> dict[str, Any]:
    """Returns the document that --output writes."""
    return {
        "schema_version": 1,
        "machine": asdict(this_machine()),
        "versions": asdict(these_versions()),
        "settings": {name: str(value) for name, value in vars(args).items()},
        "could_not_run": list(refused),
        "figures": [asdict(figure) for figure in figures],
        "disagreements": [{**asdict(d), "of_kernel": d.of_kernel} for d in disagreements(figures)],
        "allowed": ALLOWED,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    began = time.perf_counter()
    figures: list[Figure] = []
    refused: list[str] = []

    def raw() -> dict[str, Any]:
        return {"figures": [asdict(figure) for figure in figures], "could_not_run": refused}

    with kept(args.output, lambda: document(args, figures, refused), raw):
        asyncio.run(measure_all(args, lambda text: print(text, file=sys.stderr, flush=True), figures, refused))
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(f"machine: {this_machine()}; transfers of {args.bytes} bytes at {args.bandwidth_mbps:g} Mbit/s")
    console.print(table_of_figures(figures))
    for reason in refused:
        console.print(f"could not run {reason}", highlight=False)
    if found := disagreements(figures):
        console.print(table_of_disagreements(found, figures[-1].link))
        settled = [abs(d.of_kernel) for d in found if d.what != COLD]
        verdict = "within" if max(settled) <= ALLOWED else "NOT within"
        console.print(f"but for new connections they differ by at most {max(settled):.2%}: {verdict} {ALLOWED:.0%}")
    console.print(f"took {time.perf_counter() - began:.0f} s; wrote {args.output}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

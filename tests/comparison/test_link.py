"""Emulated links: beside real servers, and recorded, jittery, asymmetric ones against a queue computed offline."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from pathlib import Path

import pytest

from tandem.cli.compare import build_config
from tandem.cli.compare_flags import build_parser
from tandem.comparison.links.delay_proxy import Wire
from tandem.comparison.links.link import DelayLink
from tandem.comparison.links.link_settings import SEGMENT_BYTES, LinkSettings, TracedLink, read_trace
from tests.comparison.reference_queue import departures, generated
from tests.comparison.test_delay_proxy import Proxy, listener, proxy
from tests.support import HANG, target_site
from tests.timing import ROOM


async def test_a_call_over_grpc_takes_the_round_trip_that_the_link_is_set_to_now():
    async with target_site() as site, DelayLink() as link:
        site.address = await link.listen(site.address)
        async with site.client() as client:
            assert (await client.model_info()).backend == "toy"
            for rtt_ms in (0, 60, 20):  # over one connection; of many calls one must be as fast as the link
                await link.set(LinkSettings(rtt_ms))
                took, give_up = HANG, time.monotonic() + HANG
                while took >= rtt_ms / 1000 + 0.03:
                    assert time.monotonic() < give_up
                    began = time.monotonic()
                    await client.model_info()
                    took = time.monotonic() - began
                    assert took >= rtt_ms / 1000


async def test_the_overhead_is_measured_at_the_settings_of_the_moment():
    async with DelayLink() as link:
        for rtt_ms in (0, 10):
            await link.set(LinkSettings(rtt_ms))
            began, median = time.monotonic(), HANG
            while median >= rtt_ms / 1000 + ROOM:  # load delays some measurements, a fault all of them
                found = await link.overhead(samples=20)
                median, took = found.link_p50_s, time.monotonic() - began
                assert (found.samples, found.nominal_s) == (20, rtt_ms / 1000)
                assert 0 < found.direct_p50_s < took < HANG
                assert rtt_ms / 1000 < found.link_p50_s <= found.link_p95_s < took


async def test_a_proxy_that_has_ended_is_said_to_have():
    async with DelayLink() as link:
        await link.stop()
        with pytest.raises(RuntimeError, match=r"comparison\.links\.delay_proxy ended with code 0"):
            await link.set(LinkSettings(1))


def test_the_connections_of_a_link_that_is_left_are_closed_also_after_an_error():
    async def run(server: socket.socket) -> socket.socket:
        async with DelayLink() as link:
            host, _, port = (await link.listen(f"127.0.0.1:{server.getsockname()[1]}")).rpartition(":")
            client = socket.create_connection((host, int(port)), timeout=HANG)
            far, _ = await asyncio.to_thread(server.accept)
            with far:
                raise KeyError(client)

    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(KeyError) as raised:
            asyncio.run(run(server))
        with raised.value.args[0] as client, contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


__all__ = ("listener", "proxy")  # fixtures


def written(folder: Path, times: list[int], name: str = "trace.up") -> str:
    file = folder / name
    file.write_text("".join(f"{each}\n" for each in times))
    return str(file)


# --- recorded links ---


@pytest.mark.parametrize("seed", range(8))
def test_a_replayed_trace_agrees_with_the_queue_computed_offline(seed: int) -> None:
    noise = random.Random(seed)
    times = generated(noise)
    sent, now = [], 0.0
    for _ in range(400):  # now and then more than the link takes, and pauses in which it empties
        now += noise.choice((0, 0, 0.001, 0.0137, 0.4, 3.0)) * noise.random()
        sent.append((now, noise.choice((64, 200, 800, SEGMENT_BYTES))))
    wire = Wire()
    wire.set(trace=TracedLink(times, began=0.0))
    found = [wire.due(at, size) for at, size in sent]
    assert found == pytest.approx(departures(times, sent), abs=1e-9)


def test_a_recorded_link_begins_where_it_is_told_to(proxy: Proxy, listener: socket.socket, tmp_path: Path) -> None:
    trace = written(tmp_path, [*range(1, 1000), 60_000])  # good for a second, then out for a minute
    near, far = proxy.connected(listener)
    with near, far:
        proxy.set(0, trace_down=trace)
        far.sendall(b"x")
        near.settimeout(5.0)
        assert near.recv(1) == b"x"
        proxy.set(0, trace_down=trace, trace_from=0.5)
        far.sendall(b"y")
        near.settimeout(0.5)
        with pytest.raises(TimeoutError):
            near.recv(1)
    with pytest.raises(ValueError, match=r"trace-from: 1\.5 is not between 0 and 1"):
        LinkSettings(trace_from=1.5).check()


@pytest.mark.parametrize(
    ("lines", "said"),
    [("", "does not end after 0"), ("0\n0\n", "does not end after 0"), ("1\n0\n5\n", "fall"), ("fast\n", "whole")],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(lines: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong"
    file.write_text(lines)
    with pytest.raises(ValueError, match=said) as error:
        read_trace(str(file))
    assert "\n" not in str(error.value) and str(error.value).startswith("link: trace")


# --- jitter, asymmetry ---


def test_jitter_is_within_its_bound_and_the_same_after_every_set() -> None:
    wire, found = Wire(), []
    for _ in range(2):
        wire.set(jitter=0.005, seed=1)
        found.append([wire.due(0.0, 1) for _ in range(500)])
    assert found[0] == found[1] and min(found[0]) >= 0 and max(found[0]) <= 0.005
    assert sum(found[0]) / 500 == pytest.approx(0.0025, rel=0.1)


def test_several_recorded_links_are_each_measured_at_every_round_trip(tmp_path: Path) -> None:
    files = [
        (written(tmp_path, [1, 2], f"{name}.up"), written(tmp_path, [3], f"{name}.down")) for name in ("near", "far")
    ]
    flags = [word for up, down in files for word in ("--link", f"trace:{up},{down}")]
    config = build_config(build_parser().parse_args([*flags, "--rtt-ms", "10,40", "--output-dir", str(tmp_path)]))
    assert [str(condition.link) for condition in config.conditions] == [
        "RTT 10 ms, recorded near", "RTT 40 ms, recorded near", "RTT 10 ms, recorded far", "RTT 40 ms, recorded far",
    ]  # fmt: skip
    assert len({condition.name for condition in config.conditions}) == 4

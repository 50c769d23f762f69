"""The emulated link as a comparison uses it: beside real servers, set and set again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from tandem.comparison.links.link import DelayLink, LinkOverhead, measure_overhead
from tandem.comparison.links.settings import LinkSettings
from tests.support import HANG, target_site
from tests.timing import ROOM


@pytest.mark.parametrize(
    ("rtt_ms", "bandwidth_mbps", "message"),
    [
        (-1, None, "rtt-ms: -1 is not between 0 and 10000"),
        (20_000, None, "rtt-ms: 20000 is not between 0 and 10000"),
        (float("nan"), None, "rtt-ms: nan is not between 0 and 10000"),
        (20, 0, "bandwidth-mbps: 0 is not between 0.01 and 100000"),
        (20, float("inf"), "bandwidth-mbps: inf is not between 0.01 and 100000"),
        (20, float("nan"), "bandwidth-mbps: nan is not between 0.01 and 100000"),
    ],
)
def test_settings_that_no_link_has_are_one_line_that_names_the_flag(rtt_ms, bandwidth_mbps, message):
    with pytest.raises(ValueError) as raised:
        LinkSettings(rtt_ms, bandwidth_mbps).check()
    assert str(raised.value) == message


def test_settings_say_what_they_are_and_how_long_a_round_trip_takes():
    assert str(LinkSettings(20)) == "RTT 20 ms"
    assert str(LinkSettings(20, 100)) == "RTT 20 ms, 100 Mbit/s"
    assert LinkSettings(20).small_round_trip() == 0.02
    assert LinkSettings(20, 8).small_round_trip() == pytest.approx(0.02 + 2 * 130 / 1e6)


def test_a_call_over_grpc_takes_the_round_trip_that_the_link_is_set_to_now():
    async def run() -> None:
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

    asyncio.run(run())


def test_servers_are_added_while_the_link_is_in_use():
    async def run() -> None:
        async with target_site() as one, target_site() as other, DelayLink() as link:
            await link.set(LinkSettings(2))
            addresses = [await link.listen(one.address), await link.listen(other.address)]
            assert len({*addresses, one.address, other.address}) == 4
            for site, address in zip((one, other), addresses, strict=True):
                site.address = address
                async with site.client() as client:
                    await client.model_info()

    asyncio.run(run())


def test_the_overhead_is_measured_at_the_settings_of_the_moment():
    async def run() -> None:
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

    asyncio.run(run())


def test_added_is_what_neither_the_direct_way_nor_the_settings_account_for():
    assert LinkOverhead(0.02, 0.001, 0.0215, 0.03, 200).added_s == pytest.approx(0.0005)


def test_an_address_that_is_none_is_an_error_and_the_link_goes_on():
    async def run() -> None:
        async with DelayLink() as link:
            with pytest.raises(ValueError, match=r"asked to listen nowhere:http"):
                await link.listen("nowhere:http")
            await link.set(LinkSettings(1))

    asyncio.run(run())


def test_a_proxy_that_has_ended_is_said_to_have():
    async def run() -> None:
        async with DelayLink() as link:
            await link.stop()
            with pytest.raises(RuntimeError, match=r"comparison\.links\.delay_proxy ended with code 0"):
                await link.set(LinkSettings(1))

    asyncio.run(run())


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


def test_round_trips_to_somebody_who_hangs_up_are_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        hanging_up = threading.Thread(target=lambda: server.accept()[0].close())
        hanging_up.start()
        with pytest.raises(ConnectionError):
            address = f"127.0.0.1:{server.getsockname()[1]}"
            measure_overhead(address, address, 0.0, 5)
        hanging_up.join()

"""The emulated link as a comparison uses it: beside real servers, set and set again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest

from tandem.comparison.links.link import DelayLink
from tandem.comparison.links.link_settings import LinkSettings
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

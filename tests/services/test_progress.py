"""A start says on a terminal which stage it is in, soon and regularly."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from tandem.runners.startup import Startup
from tandem.services import server
from tests.support import run, until


def test_stages_are_named_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.FIRST_SECONDS < 2 and server.EVERY_SECONDS < 5
    monkeypatch.setattr(server, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(server, "EVERY_SECONDS", 0.001)
    startup = Startup()

    async def named() -> None:
        task = asyncio.create_task(server.name_stages(startup))
        await until(lambda: caplog.text.count("starting: packing, 0 s so far") > 1)
        task.cancel()

    with caplog.at_level(logging.INFO), startup.stage("packing"):
        run(server.name_stages(startup))
        assert caplog.text == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        run(named())

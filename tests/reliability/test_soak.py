"""After a storm of clients that come, leave and are killed, a server holds what it held before."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tandem.speculation.verification_mode import Pipeline
from tests.reliability.soak import soak

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "60"))  # `make soak` sets an hour
KINDS = {"ask", "leave", "late", "session", "abandon", "cancel_open", "never_wait", "hostile"}


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_a_short_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    result = asyncio.run(soak(tmp_path, 4.0, 2, 0.5))
    assert result.wrongs() == [] and result.counts["tokens"] > 0
    assert sum(result.done.values()) > result.done["client processes killed"] >= 1


@pytest.mark.campaign
@pytest.mark.timeout(SECONDS + 400)
def test_a_minute_of_storm_with_32_clients_leaves_nothing_behind(tmp_path: Path) -> None:
    result = asyncio.run(soak(tmp_path, SECONDS, 4, 3.0, pipeline=Pipeline.NEVER_WAITING))
    print(dict(result.counts), dict(result.done))
    assert result.wrongs() == [] and result.counts["tokens"] > 0
    assert result.counts.keys() >= KINDS

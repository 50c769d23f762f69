"""After a storm of clients that come, leave and are killed, a server holds what it held before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.reliability import figures
from tests.reliability.soak import MOST_MORE, Soaked, soak
from tests.reliability.soak_client import CLIENTS


def soaked(folder: Path, seconds: float, processes: int, between_kills: float) -> Soaked:
    result: Soaked = asyncio.run(soak(folder, seconds, processes, between_kills))
    assert not result.wrongs(), result.wrongs()
    assert result.counts["tokens"] > 50 * seconds
    return result


def note(result: Soaked, processes: int) -> None:
    counts = {name: n for name, n in result.counts.items() if name not in ("tokens", "wrong")}
    more = {
        what: max(result.after[server][what] - result.before[server][what] for server in result.after)
        for what in MOST_MORE
    }
    figures.note(
        f"soak of {result.seconds:g} s",
        clients=processes * CLIENTS,
        operations=result.operations,
        by_kind=counts,
        killed_client_processes=result.kills,
        tokens=result.counts["tokens"],
        wrong_outputs=result.counts["wrong"],
        held_more_than_before=more,
    )


def test_a_short_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    result = soaked(tmp_path, 5.0, 2, 2.0)
    assert result.kills >= 1
    assert {"ask", "leave", "session", "abandon", "cancel_open", "break"} <= result.counts.keys()


@pytest.mark.campaign
@pytest.mark.timeout(200)
def test_a_minute_of_storm_with_32_clients_leaves_nothing_behind(tmp_path: Path) -> None:
    note(soaked(tmp_path, 60.0, 4, 3.0), 4)


@pytest.mark.campaign
@pytest.mark.marathon
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_minutes_of_storm_with_32_clients_leave_nothing_behind(tmp_path: Path) -> None:
    note(soaked(tmp_path, 600.0, 4, 3.0), 4)

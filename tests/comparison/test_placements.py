"""`advise --ping`: round trips that are measured to real servers, and the ranking that follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.clients.round_trips import Reached, reached
from tandem.comparison.analysis.advice import basis
from tandem.comparison.analysis.placements import placement_lines, ranked, run_placements
from tandem.comparison.links.link import DelayLink
from tandem.comparison.links.settings import LinkSettings
from tests.comparison.test_advice import comparison, written
from tests.support import run, target_site, toy

NEAR, FAR = Reached("near:1", "TargetVerifier", 0.002), Reached("far:1", "TargetVerifier", 0.400)
LOST = Reached("lost:1", failure="nothing listens at lost:1")


def test_the_nearer_server_comes_first_and_one_that_does_not_answer_last() -> None:
    model, _ = basis(comparison())
    found = ranked(model, None, [LOST, FAR, NEAR], 1)
    assert [each.server for each in found] == [NEAR, FAR]
    assert all(each.here is not None and each.here.architecture in ("distributed", "never_waiting") for each in found)
    assert found[0].there.architecture == "fused" and found[0].there.tpot_s == found[1].there.tpot_s
    lines = list(placement_lines(model, None, [LOST, FAR, NEAR]))
    assert lines[1].startswith("  1. near:1 (TargetVerifier): 2.0 ms")
    assert lines[-1] == "  -  lost:1: nothing listens at lost:1"


def test_round_trips_to_real_servers_are_those_of_their_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with target_site(toy()) as site, DelayLink() as link:
            across, nobody = await link.listen(site.address), "127.0.0.1:1"
            await link.set(LinkSettings(60.0))
            near, far, lost = await reached([site.address, across, nobody], calls=3)
            assert near.service == far.service == "TargetVerifier"
            assert near.rtt_s < 0.06 <= far.least_s <= far.rtt_s <= far.most_s
            assert "nothing listens" in lost.failure
            report = written(tmp_path, comparison())
            assert await run_placements(report, [across, site.address]) == 0
            said = capsys.readouterr().out
            assert said.index(site.address) < said.index(across)
            assert await run_placements(report, [nobody]) == 1

    run(test())


def test_addresses_and_the_report_are_checked_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = str(written(tmp_path, comparison()))
    assert main(["--role", "advise", "--report", report, "--ping", "host"]) == 2
    assert "ping: 'host' is not HOST:PORT" in capsys.readouterr().err
    assert main(["--role", "advise", "--report", report, "--ping", "127.0.0.1:1", "--rtt_ms", "5"]) == 2
    assert "rtt_ms: --ping measures it" in capsys.readouterr().err

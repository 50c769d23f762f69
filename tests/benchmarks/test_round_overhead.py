"""The overhead benchmark from end to end: a real server process of the toy runner, few rounds."""

from __future__ import annotations

import json

import pytest

from benchmarks.round_overhead import main

pytestmark = pytest.mark.thorough
PARTS = ("client, around the call", "gRPC and network", "server handler", "queue, as reported", "compute, as reported")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    output = tmp_path_factory.mktemp("benchmark") / "deeper" / "overhead.json"
    code = main(["--rounds", "60", "--real_rounds", "0", "--output", str(output)])
    return code, json.loads(output.read_text())


def test_it_measures_and_writes(run):
    code, document = run
    assert code == 0
    assert document["aim_ms"] == 1.0
    assert document["overheads_ms"]["toy server"] > 0


def test_every_direct_measurement_took_time(run):
    rows = [row for table in run[1]["tables"].values() for row in table]
    assert len(rows) > 15
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in rows if row["how"] == "direct")


def test_the_parts_of_a_round_make_up_the_whole(run):
    rows = {row["part"]: row["p50_ms"] for row in run[1]["tables"]["A round against the toy server, over loopback"]}
    # Of every single round they do so exactly; medians of skewed parts only nearly.
    assert sum(rows[part] for part in PARTS) == pytest.approx(rows["whole round"], rel=0.25)


def test_bad_arguments_are_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--rounds", "0"])
    assert exit_.value.code == 2
    assert "--rounds: 0 is below 1" in capsys.readouterr().err

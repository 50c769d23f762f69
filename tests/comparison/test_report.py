"""The files and the table."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tandem.comparison.analysis.summary import summarize
from tandem.comparison.links.overhead import LinkOverhead
from tandem.comparison.links.settings import LinkSettings
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, FUSED
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Endpoint
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.identity import MarginTrace
from tandem.comparison.measuring.records import Failure, Record
from tandem.comparison.report.files import (
    Comparison,
    comparison_as_csv,
    comparison_as_json,
    text_of,
)
from tandem.comparison.report.load_tables import load_table
from tandem.comparison.report.terminal import print_comparison, rich_table
from tandem.comparison.report.write import write_atomically
from tests.comparison.fakes import MODEL, prompt, record
from tests.comparison.report.example_comparison import example

RECORD_KEYS = {
    "architecture",
    "prompt",
    "run",
    "output_token_ids",
    "ttft_s",
    "tpot_s",
    "end_to_end_latency_s",
    "output_tokens",
    "rounds",
    "drafted",
    "accepted",
    "accepted_per_position",
    "bytes_up",
    "bytes_down",
    "seconds_by_cause",
}
FAILED = Record("fused", "code/b", "code", 0, error=Failure("UNAVAILABLE", "gone [away]"))


def comparison(tmp_path: Path, *records: Record, address: str = "127.0.0.1:1") -> Comparison:
    traces = {"code/a": MarginTrace((1, 2, 3), (1.0, 0.0625, 1.0))}
    config = ComparisonConfig(prompts=(prompt("a"), prompt("b")), output_dir=tmp_path / "out")
    return Comparison(
        config=config,
        endpoints=(
            Endpoint(AUTOREGRESSIVE, "127.0.0.1:1", MODEL),
            Endpoint(FUSED, address, replace(MODEL, draft_name="ngram")),
        ),
        records=list(records),
        conditions=config.conditions,
        summaries={"base": summarize(records, "autoregressive", "autoregressive", traces)},
        ended=True,
        machine=this_machine(),
        versions=these_versions(),
        started_at="2026-01-01T00:00:00+00:00",
    )


def shown(of: Comparison, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_comparison(comparison_as_json(of), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_json_has_the_promised_keys(tmp_path: Path) -> None:
    of = comparison(tmp_path, record("autoregressive"), record("fused"), FAILED)
    found = json.loads(text_of(comparison_as_json(of)))
    assert found["schema_version"] == 2
    assert found["baseline"] == {"architecture": "autoregressive", "plain_width": 1}
    assert found["settings"]["prompts"][0] == {
        "name": "code/a",
        "kind": "code",
        "text": "text of a",
        "chat": False,
    }
    assert found["settings"]["sampling"]["temperature"] == 0
    assert found["settings"]["rules"] == ["agreement"]
    assert found["machine"]["usable_cores"] >= 1
    assert "python" in found["versions"]
    architectures = found["conditions"][0]["architectures"]
    assert set(architectures) == {"autoregressive", "fused"}
    assert found["servers"]["fused"]["model"]["draft_name"] == "ngram"
    assert architectures["fused"]["identical_to_autoregressive"] == {"count": 1, "total": 1, "divergences": []}
    for one in found["records"]:
        assert set(one) >= RECORD_KEYS
    assert set(found["records"][0]["seconds_by_cause"]) == {"draft", "verify", "queue", "network", "prefill", "other"}
    assert found["records"][2]["ttft_s"] is None
    assert found["records"][2]["error"] == {"code": "UNAVAILABLE", "message": "gone [away]"}


def test_the_csv_has_one_row_per_record() -> None:
    rows = list(csv.DictReader(io.StringIO(comparison_as_csv([record("fused"), FAILED]))))
    assert len(rows) == 2
    assert set(rows[0]) >= RECORD_KEYS - {"seconds_by_cause"} | {"draft_seconds", "other_seconds"}
    assert json.loads(rows[0]["output_token_ids"]) == [1, 2, 3]
    assert rows[0]["verify_seconds"] == "0.2"
    assert (rows[1]["ttft_s"], rows[1]["error_code"]) == ("", "UNAVAILABLE")


def test_a_file_is_replaced_and_never_half_written(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    path.write_text("old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_table_says_what_ran_and_that_loopback_was_the_link(tmp_path: Path) -> None:
    text = shown(comparison(tmp_path, record("autoregressive"), record("fused")))
    assert "ref" in text
    assert "1/1" in text
    assert "drafter: ngram" in text
    assert "dtype float32" in text
    assert "k = auto" in text
    assert "link: loopback TTFT" in " ".join(text.split())  # lines break by the name of the machine's processor
    assert "machine: " in text


def test_every_figure_is_whole_on_a_terminal_of_80_columns(tmp_path: Path) -> None:
    text = shown(comparison(tmp_path, record("autoregressive_width_1"), record("autoregressive"), record("fused")), 80)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "tical" in text and text.count("1/1") == 2  # the last column is not cut off


def test_every_figure_under_load_is_whole_on_a_terminal_of_80_columns() -> None:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(rich_table(load_table(example()).on_terminal()))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text and "tical" in text
    assert text.count("10/10") == 20 and text.count("* fused") == 5


def test_a_server_elsewhere_is_named_in_the_link(tmp_path: Path) -> None:
    of = comparison(tmp_path, record("fused"), address="10.0.0.3:50051")
    assert of.link == "loopback, except fused at 10.0.0.3:50051"


def test_what_an_emulated_link_takes_and_adds_is_printed(tmp_path: Path) -> None:
    plain = comparison(tmp_path, record("autoregressive"), record("fused"))
    base = replace(plain.conditions[0], link=LinkSettings(20.0))
    links = {base.link: LinkOverhead(0.02, 0.0001, 0.0202, 0.021, 50)}
    text = shown(replace(plain, conditions=(base,), links=links))
    link = next(line for line in text.splitlines() if "emulated: a delay proxy on loopback" in line)
    assert link.split()[-5:] == ["20", "–", "0.10", "20.20", "0.10"]  # RTT, bandwidth, without, over, added
    assert "Architectures: base, emulated RTT 20 ms" in text


def test_a_divergence_is_plain_to_see(tmp_path: Path) -> None:
    of = comparison(tmp_path, record("autoregressive"), record("fused", output_token_ids=(1, 9, 3)))
    text = shown(of)
    assert "0/1" in text
    assert "Token-identical to plain decoding: 0 of 1 outputs. 1 differ:" in text
    found = next(line for line in text.splitlines() if "code/a, run 0" in line)
    assert found.split() == ["fused", "base", "code/a,", "run", "0", "1", "9", "2", "0.0625"]
    divergence = comparison_as_json(of)["conditions"][0]["architectures"]["fused"]["identical_to_autoregressive"][
        "divergences"
    ][0]
    assert divergence == {
        "prompt": "code/a",
        "run": 0,
        "position": 1,
        "autoregressive_token": 2,
        "token": 9,
        "logit_gap": 0.0625,
    }


def test_failures_are_counted_and_quoted(tmp_path: Path) -> None:
    text = shown(comparison(tmp_path, record("autoregressive"), record("fused"), FAILED))
    assert "1 of 2 failed" in text
    found = next(line for line in text.splitlines() if "code/b, run 0" in line)
    assert found.split() == ["fused", "base", "code/b,", "run", "0", "UNAVAILABLE", "gone", "[away]"]


def test_a_terminal_shows_the_first_rows_of_what_pages_fold_and_all_of_other_tables(tmp_path: Path) -> None:
    many = [replace(FAILED, run=run) for run in range(40)]
    text = shown(comparison(tmp_path, record("autoregressive"), record("fused"), *many))
    assert "All 40 failures:" in text and "and 10 more, in comparison.json" in text
    assert text.count("UNAVAILABLE") == 30
    screen = Console(width=130, file=io.StringIO(), color_system=None)
    print_comparison(example(), screen)
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue().count("* fused") == len(example()["under_load"]["points"]) == 5


def test_clamped_seconds_are_said_so(tmp_path: Path) -> None:
    text = shown(comparison(tmp_path, record("autoregressive"), record("fused", other_clamped=True)))
    assert "In 1 request the named causes overlapped" in text

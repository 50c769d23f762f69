"""What a run shows on stderr, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tandem.comparison.measuring import progress
from tandem.comparison.measuring.progress import Progress
from tandem.comparison.measuring.records import Failure, Record
from tests.comparison.fakes import record

FAILED = Record("fused", "code/b", "code", 0, error=Failure("UNAVAILABLE", "gone [away]"))


def shown(verbose: bool = False, terminal: bool = False) -> str:
    file = io.StringIO()
    with Progress(Console(file=file, width=100, force_terminal=terminal, color_system=None), verbose) as run:
        run.waiting("fused", 2.0)
        run.ready("fused", "127.0.0.1:5", 3.0)
        run.expect(4)
        run.say("fused · code/a")
        run.measured(record("fused"))
        run.measured(FAILED)
        run.say("fused · code/c")
    return file.getvalue()


def test_a_log_has_only_failures_in_its_first_seconds_and_a_terminal_a_bar() -> None:
    assert shown() == "fused · code/b: UNAVAILABLE: gone [away]\n"
    bar = shown(terminal=True)
    assert "fused · code/c" in bar and "2/4" in bar


def test_a_log_says_now_and_then_what_is_measured_and_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    lines = shown().splitlines()
    assert lines[:2] == ["starting fused (2 s)", "[0/4] fused · code/a"] and lines[-1].startswith(
        "[2/4] fused · code/c"
    )


def test_every_server_and_request_is_shown_on_demand() -> None:
    assert shown(verbose=True).splitlines() == [
        "fused is ready on 127.0.0.1:5 after 3.0 s",
        "[1/4] fused · code/a: 3 tokens in 2.00 s",
        "fused · code/b: UNAVAILABLE: gone [away]",
    ]

"""A start says on a terminal which stage it is in, soon and regularly."""

from __future__ import annotations

import logging
import sys

import pytest

from tandem.runners.startup import Startup
from tandem.services import progress as progresses
from tandem.services.progress import progress
from tests.support import run, until


def test_stages_are_named_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progresses, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progresses, "EVERY_SECONDS", 0.001)
    startup = Startup()
    with caplog.at_level(logging.INFO):
        with progress(startup), startup.stage("packing"):
            pass
        assert caplog.text == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        with progress(startup), startup.stage("packing"):
            run(until(lambda: caplog.text.count("starting: packing, 0 s so far") > 1))
    assert startup.now == "loading"


def test_the_first_line_and_the_next_come_within_what_was_promised() -> None:
    assert progresses.FIRST_SECONDS < 2 and progresses.EVERY_SECONDS < 5

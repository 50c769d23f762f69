"""Campaigns end with one summary of what they measured, and write it to results/reliability.json."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reliability import figures


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if figures.noted() and "campaign" in config.getoption("markexpr"):
        figures.write()
        terminalreporter.section("reliability")
        for line in figures.summary():
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"written to {figures.PATH}")

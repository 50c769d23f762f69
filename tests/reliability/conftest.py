"""Campaigns end with one summary of what they measured, and write it to results/reliability.json."""

from __future__ import annotations

from typing import Any

from tests.reliability import figures


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if figures.noted():
        figures.write()
        terminalreporter.section("reliability")
        for line in figures.summary():
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"written to {figures.PATH}")

"""Installs load tools, each in a virtual environment of its own, and runs them once for each measurement."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.load_tools import Run, Tool, ToolFailed, ToolFigures
from benchmarks.process_groups import ProcessGroups

COMPLETE = ".complete"


@dataclass(frozen=True)
class ToolRunner:
    """Runs tools that are installed below `root`. `timeout_s`: of one run, the tool's own start included."""

    root: Path
    timeout_s: float
    groups: ProcessGroups = field(default_factory=ProcessGroups)

    async def install(self, tool: Tool, pip_arguments: Sequence[str] = ()) -> None:
        """Makes the tool's environment, unless it is there. Raises ToolFailed."""
        folder = self.root / tool.name
        marker = folder / COMPLETE
        if marker.is_file() and marker.read_text() == "\n".join(tool.pins):
            return
        self.root.mkdir(parents=True, exist_ok=True)
        log = self.root / f"{tool.name}.log"
        for step in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *pip_arguments, *tool.pins],
        ):
            async with self.groups.running(step, os.environ, log) as process:
                if await process.wait():
                    raise ToolFailed(f"{tool.name} cannot be installed: {_last(log)} ({log})")
        marker.write_text("\n".join(tool.pins))

    async def measure(self, tool: Tool, run: Run, folder: Path) -> ToolFigures:
        """Runs a tool once; its own files and its log stay in `folder`. Raises ToolFailed."""
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        command = tool.command(self.root / tool.name / "bin", run, folder)
        with tempfile.TemporaryDirectory(prefix="tool-", ignore_cleanup_errors=True) as scratch:
            variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
            env = {**variables, "TMPDIR": scratch, **tool.environment()}
            async with self.groups.running(command, env, log) as process:
                ending = asyncio.ensure_future(process.wait())
                ended, _ = await asyncio.wait({ending}, timeout=self.timeout_s)
        if not ended:
            raise ToolFailed(f"{tool.name}: not done after {self.timeout_s:g} s ({log})")
        if process.returncode:
            raise ToolFailed(f"{tool.name} ended with {process.returncode}: {_last(log)} ({log})")
        figures = tool.figures(folder)
        if not figures.completed:
            raise ToolFailed(f"{tool.name}: no request was completed, {figures.errors} failed ({log})")
        return figures


def _last(log: Path) -> str:
    """Returns the last error that a log names, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return (errors or lines or ["it said nothing"])[-1]

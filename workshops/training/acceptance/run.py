"""Implements --role accept: measures a pair, prints the results, and writes them as JSON."""

from __future__ import annotations

from pathlib import Path

from tandem.host.device_times import text_of
from tandem.workshops.training.acceptance.measure import AcceptConfig, measure
from tandem.workshops.training.acceptance.show import print_measured


async def run_accept(config: AcceptConfig, file: Path | None) -> None:
    """Measures and prints; also writes the results as JSON to `file`, unless it is None."""
    from rich.console import Console

    screen, progress = Console(), Console(stderr=True)
    with progress.status("loading the pair") as status:
        found = await measure(config, status.update)
    if file:  # before anything is said of it
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found.as_json() + "\n")
        times = file.with_suffix(".step_times.json")
        if found.step_times:
            times.write_text(text_of(found.step_times), encoding="utf-8")
    print_measured(found, screen)
    if file:
        screen.print(f"wrote {file}" + (f" and {times}" if found.step_times else ""), highlight=False)

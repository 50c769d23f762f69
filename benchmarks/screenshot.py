"""Takes a screenshot of the top of a report with chromium (`make screenshot`)."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIETLY = (
    "--headless",
    "--no-sandbox",  # for root in a container; the page is our own file and has no scripts
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)


def browser() -> str | None:
    """Returns the path of a browser that takes headless screenshots, if there is one."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def newest_report(results: Path) -> Path | None:
    found = sorted(results.glob("*/report.html"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def command(executable: str, page: Path, picture: Path, profile: Path, size: tuple[int, int]) -> list[str]:
    """Returns the browser's command. `size`: width and height in CSS pixels."""
    window = f"--window-size={size[0]},{size[1]}"
    where = [f"--user-data-dir={profile}", f"--screenshot={picture.resolve()}", page.resolve().as_uri()]
    return [executable, *QUIETLY, window, *where]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screenshot", description=__doc__)
    parser.add_argument("report", nargs="?", type=Path, help="a report.html; the newest of results/ if none is named")
    parser.add_argument("--output", type=Path, default=Path("docs/report.png"))
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=1560)
    args = parser.parse_args(arguments)
    page = args.report or newest_report(Path("results"))
    if page is None or not page.is_file():
        print(f"screenshot: {page or 'results/*/report.html'} is not there; run make compare first", file=sys.stderr)
        return 2
    executable = browser()
    if executable is None:
        print("screenshot: needs chromium (Debian and Ubuntu: apt install chromium)", file=sys.stderr)
        return 2
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        run = command(executable, page, args.output, Path(profile), (args.width, args.height))
        done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode or not args.output.is_file():
        last = done.stderr.strip().rpartition("\n")[2]
        print(f"screenshot: {executable} failed ({done.returncode}): {last}", file=sys.stderr)
        return 1
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Installs a requirements file with pip and shows one bar: `python packages/install.py FILE [pip's arguments]`."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from threading import Thread

WIDTH = 30  # columns of the bar
LOG_SECONDS = 20.0  # between lines where stderr is no terminal
TAIL_LINES = 20  # of pip's output, after a failure
UNPACKING = "Installing collected packages: "
QUIETLY = ("--disable-pip-version-check", "--progress-bar", "off")


def unpacked() -> int:
    return len(list(Path(sysconfig.get_path("purelib")).glob("*.dist-info")))


def main(arguments: list[str]) -> int:
    file, *more = arguments
    output, before = list[str](), unpacked()
    command = [sys.executable, "-m", "pip", "install", *QUIETLY, "-r", file, *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout
        reading = Thread(target=output.extend, args=(pip.stdout,))
        reading.start()
        terminal, shown_at = sys.stderr.isatty(), time.monotonic()
        while pip.poll() is None:
            time.sleep(0.2)
            if terminal or time.monotonic() - shown_at > LOG_SECONDS:
                shown_at, line = time.monotonic(), progress(list(output), unpacked() - before)
                print(f"\r\033[K{line}" if terminal else f"{line}\n", end="", file=sys.stderr, flush=True)
        reading.join()
    print("\r\033[K" if terminal else "", end="", file=sys.stderr)
    if pip.returncode:
        print("".join(output[-TAIL_LINES:]), end="", file=sys.stderr)
    return pip.returncode


def progress(output: list[str], count: int) -> str:
    """Returns the bar, whose first half are downloads, and what is being done. `count`: unpacked packages."""
    found = [match[1] for line in output if (match := re.match(r"\s*Collecting ([\w.-]+)", line))]
    listed = next((line.count(",") + 1 for line in output if line.startswith(UNPACKING)), 0)
    share = 0.5 + 0.5 * min(1.0, count / listed) if listed else 0.5 - 0.5 / (1 + len(found) / 20)  # of unknown many
    what = f"unpacking: {count} of {listed}" if listed else f"downloading: {len(found)}"
    return f"[{'#' * int(WIDTH * share):{WIDTH}}] {what} packages{f' ({found[-1]})' if found and not listed else ''}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Installs a requirements file with pip and shows one bar: `python packages/install.py FILE [pip's arguments]`."""

from __future__ import annotations

import os
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


def expected(file: Path) -> int:
    """Counts the packages that a requirements file pins, with those of the files that it names."""
    lines = file.read_text().splitlines()
    named = (expected(file.parent / line.split()[1]) for line in lines if line.startswith("-r "))
    return sum("==" in line for line in lines) + sum(named)


def unpacked() -> int:
    return len(list(Path(sysconfig.get_path("purelib")).glob("*.dist-info")))


def main(arguments: list[str]) -> int:
    file, *more = arguments
    quiet = ["--disable-pip-version-check", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "-r", file, *more]
    output, total, before = list[str](), expected(Path(file)), unpacked()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout
        reading = Thread(target=output.extend, args=(pip.stdout,))
        reading.start()
        terminal, shown_at = sys.stderr.isatty(), time.monotonic()
        while pip.poll() is None:
            time.sleep(0.2)
            if terminal or time.monotonic() - shown_at > LOG_SECONDS:
                shown_at = time.monotonic()
                share, what = progress(list(output), total, unpacked() - before)
                line = f"[{'#' * int(WIDTH * share):{WIDTH}}] {what}"
                width = os.get_terminal_size(2).columns - 1 if terminal else len(line)
                print(f"\r\033[K{line[:width]}" if terminal else line, end="" if terminal else "\n", file=sys.stderr)
                sys.stderr.flush()
        reading.join()
    print("\r\033[K" if terminal else "", end="", file=sys.stderr)
    if pip.returncode:
        print("".join(output[-TAIL_LINES:]), end="", file=sys.stderr)
    return pip.returncode


def progress(output: list[str], total: int, count: int) -> tuple[float, str]:
    """Returns the share that is done, half of it downloads, and what is being done."""
    if listed := next((line for line in output if line.startswith(UNPACKING)), None):
        names = listed.count(",") + 1
        return 0.5 + 0.5 * min(1.0, count / names), f"unpacking: {min(count, names)} of {names} packages"
    found = [match[1] for line in output if (match := re.match(r"\s*Collecting ([\w.-]+)", line))]
    name = f" ({found[-1]})" if found else ""
    return 0.5 * min(1.0, len(found) / max(1, total)), f"downloading: {len(found)} packages{name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

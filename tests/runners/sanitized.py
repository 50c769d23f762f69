"""Runs tests with the native library built under the address and undefined-behaviour sanitizers; a finding ends it.

    python -m tests.runners.sanitized [--sources FOLDER] TEST_FILE...

`LD_PRELOAD` names the compiler's libasan. The library lies in a cache file of its own, since its flags are others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.runners.native import compilation

FLAGS = ("-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def main(arguments: list[str]) -> int:
    planted = arguments[0] == "--sources"  # few steps: compiling takes longer than running
    level = "-O0" if planted else "-O1"
    compilation.FLAGS = (*(flag for flag in compilation.FLAGS if flag != "-O3"), level, *FLAGS)
    if planted:
        compilation.SOURCES = Path(arguments[1])
        arguments = arguments[2:]
    print(f"built: {compilation.library_path().name}", flush=True)
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

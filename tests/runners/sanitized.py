"""Runs tests with the native library built under the address and undefined-behaviour sanitizers; a finding ends it.

    python -m tests.runners.sanitized [--sources FOLDER] TEST_FILE...

`LD_PRELOAD` names the compiler's libasan. The library lies in a cache file of its own, since its flags are others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.runners.native import compilation

FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def main(arguments: list[str]) -> int:
    compilation.FLAGS = (*(flag for flag in compilation.FLAGS if flag != "-O3"), *FLAGS)
    if arguments[0] == "--sources":
        compilation.SOURCES = Path(arguments[1])
        arguments = arguments[2:]
    print(f"built: {compilation.library_path().name}", flush=True)
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

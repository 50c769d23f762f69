"""The shares of a suite are apart and together are all of it."""

from __future__ import annotations

import subprocess
import sys

from tests.support import REPOSITORY

FILES = ("tests/speculation/test_types.py", "tests/speculation/test_errors.py")


def collected(*arguments: str) -> list[str]:
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", *FILES, *arguments]
    ran = subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [line for line in ran.stdout.splitlines() if "::" in line]


def test_two_shares_are_apart_meet_every_file_and_are_all_of_it() -> None:
    whole, first, second = collected(), collected("--share", "1/2"), collected("--share", "2/2")
    assert sorted(first + second) == sorted(whole) and len(whole) > 4
    for share in (first, second):
        assert {test.split("::")[0] for test in share} == set(FILES)

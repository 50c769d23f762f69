"""`make test` and the shares of `make thorough` are apart and together are all of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product

from tests.daily import covering
from tests.speculation import laws
from tests.support import REPOSITORY

FILES = ("tests/speculation/test_law.py", "tests/speculation/test_processing.py")


# One process collects for each line that it is given: importing all that the files import takes the longest.
COLLECTING = """
import json, sys, pytest
for line in sys.stdin:
    print("collects", flush=True)
    if code := pytest.main(["--collect-only", "-q", *json.loads(line)]):
        sys.exit(code)
"""


def collected(*asked: Sequence[str]) -> list[list[str]]:
    """The tests that each of these arguments chooses."""
    lines = "\n".join(json.dumps([*FILES, *arguments]) for arguments in asked)
    command = [sys.executable, "-c", COLLECTING]
    ran = subprocess.run(command, cwd=REPOSITORY, input=lines, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    parts = ran.stdout.split("collects\n")[1:]
    assert len(parts) == len(asked)
    return [[line for line in part.splitlines() if "::" in line] for part in parts]


def test_make_test_and_two_shares_are_apart_meet_every_file_and_are_all_of_it() -> None:
    shares = (["-m", "thorough", "--share", share] for share in ("1/2", "2/2"))
    whole, daily, first, second = collected(["-m", "thorough or not thorough"], [], *shares)
    assert sorted(daily + first + second) == sorted(whole) and len(set(whole)) == len(whole)
    for part in (daily, first, second):
        assert {test.split("::")[0] for test in part} == set(FILES)
    # Of the combinations of test_law.py, make test runs few, which have every value.
    few = [found[1] for test in daily if (found := re.search(r"::test_the_law_of_the_loop_enum.*\[(.*)\]", test))]
    assert len(few) == len(laws.COUPLINGS)
    assert {each.partition("-")[0] for each in few} == {"0", "1", "2", "3"}
    assert {each.partition("-")[2] for each in few} == set(laws.COUPLINGS)


def test_a_few_combinations_hold_each_value() -> None:
    combinations = [{("a", a), ("b", b), ("c", c)} for a, b, c in product(range(5), range(3), range(2))]
    kept = covering(combinations)
    assert len(kept) == 5
    assert set().union(*(combinations[place] for place in kept)) == set().union(*combinations)
    assert covering([]) == set() and covering([{("a", 1)}] * 3) == {0}

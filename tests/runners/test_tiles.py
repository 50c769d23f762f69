"""AMX tiles, emulated here, give the bits of other instructions, and are left out where they are refused."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.checkpoints.gguf_blocks import FORMATS
from tandem.runners.native import compilation
from tandem.runners.native.compilation import LEVELS
from tandem.runners.native.steps import TileState, log_tiles

PROGRAM = Path(__file__).with_name("tile_bits.cpp")
EMULATED = (f"-I{PROGRAM.parent}", '-DTANDEM_EMULATED_TILES="emulated_tiles.h"')
TOKENS, LENGTHS = 40, 4
"""Products of each number of tokens up to 40, in matrices of four lengths."""
FLAGS = {level.name: level.flags for level in LEVELS}
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


def compiled(folder: Path, *flags: str) -> Path:
    """The program that compares, at once with its kernels."""
    kept = [flag for flag in compilation.FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    sources = [f"-I{compilation.SOURCES}", PROGRAM, compilation.SOURCES / "products.cpp"]
    subprocess.run(["g++", *kept, "-w", *flags, *sources, "-o", folder / "tile_bits"], check=True)
    return folder / "tile_bits"


def compared(program: Path, **environment: str) -> tuple[TileState, list[tuple[int, int, int]]]:
    """The state, and of each format: products compared, those of them by tiles, those that differ."""
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=True, env=os.environ | environment)
    state, *rows = ran.stdout.splitlines()
    kinds = sorted(form.kind for form in FORMATS.values())
    assert [int(row.partition(":")[0]) for row in rows] in (kinds, [0, *kinds])  # 0: bfloat16, by tiles alone
    counts = [[int(word) for word in row.partition(":")[2].split() if word.isdigit()] for row in rows]
    return TileState(int(state)), [(all_, by_tiles, differ) for all_, by_tiles, differ in counts]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    sanitized = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return compiled(tmp_path_factory.mktemp("emulated"), *sanitized, *EMULATED)


def all_right(rows: Sequence[tuple[int, int, int]]) -> bool:
    """Returns whether no product differs, and tiles made all that take other instructions two passes or more."""
    widest = {len(range(each, TOKENS)) * LENGTHS for each in (0, 4, 6, 8)}  # tokens of a pass, by CPU
    right = [row[0] == TOKENS * LENGTHS and row[1] in widest and row[2] == 0 for row in rows]
    return len(rows) == len(FORMATS) + 1 and all(right)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_tiles_give_the_right_bits_in_every_format_and_touch_nothing_but_their_memory(emulated: Path) -> None:
    state, rows = compared(emulated)
    assert state == TileState.USED
    assert all_right(rows), rows


@pytest.mark.thorough
def test_where_the_system_refuses_tiles_products_go_without(emulated: Path) -> None:
    state, rows = compared(emulated, TILES_ARE_REFUSED="1")
    assert state == TileState.REFUSED
    assert [row[1:] for row in rows] == [(0, 0)] * len(FORMATS)


@pytest.mark.skipif("amx_int8" not in compilation.cpu_features().split(), reason="needs a CPU with AMX")
@needs_compiler
def test_the_instructions_themselves_give_the_same_bits(tmp_path: Path) -> None:
    state, rows = compared(compiled(tmp_path, "-O3"))
    assert state in (TileState.USED, TileState.REFUSED)
    assert all_right(rows) or state == TileState.REFUSED, rows


def test_what_becomes_of_tiles_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_tiles.cache_clear()
    with caplog.at_level(logging.INFO):
        for state in (1, 1, 2, 2, 0, 3):
            log_tiles(TileState(state))
    log_tiles.cache_clear()
    used, refused = (record.getMessage() for record in caplog.records if record.levelname == "INFO")
    assert "go through AMX tiles" in used and "the system refuses them" in refused

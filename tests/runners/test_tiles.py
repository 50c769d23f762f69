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
    sources = [PROGRAM, compilation.SOURCES / "products.cpp"]
    own = [
        "-std=c++20",
        "-march=native",
        "-ffp-contract=off",
        "-pthread",
        "-w",
        "-Wno-psabi",
        f"-I{compilation.SOURCES}",
    ]
    processes = []
    for source in sources:
        made = folder / f"{source.stem}.o"
        processes.append(subprocess.Popen(["g++", *own, *flags, "-c", str(source), "-o", str(made)]))
    assert [process.wait() for process in processes] == [0, 0]
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    subprocess.run(["g++", *own, *flags, *objects, "-o", str(folder / "tile_bits")], check=True)
    return folder / "tile_bits"


def compared(program: Path, **environment: str) -> tuple[TileState, list[tuple[int, int, int]]]:
    """The state, and of each format: products compared, those of them by tiles, those that differ."""
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=True, env=os.environ | environment)
    state, *rows = ran.stdout.splitlines()
    assert [int(row.partition(":")[0]) for row in rows] == sorted(form.kind for form in FORMATS.values())
    counts = [[int(word) for word in row.partition(":")[2].split() if word.isdigit()] for row in rows]
    return TileState(int(state)), [(all_, by_tiles, differ) for all_, by_tiles, differ in counts]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    return compiled(tmp_path_factory.mktemp("emulated"), "-O1", *EMULATED)


def all_right(rows: Sequence[tuple[int, int, int]]) -> bool:
    """Returns whether no product differs, and tiles made all that take other instructions two passes or more."""
    widest = {len(range(each, TOKENS)) * LENGTHS for each in (4, 6, 8)}  # tokens of a pass, by CPU
    return all(row[0] == TOKENS * LENGTHS and row[1] in widest and row[2] == 0 for row in rows)


@pytest.mark.thorough
def test_tiles_give_the_bits_of_other_instructions_in_every_format(emulated: Path) -> None:
    state, rows = compared(emulated)
    assert state == TileState.USED
    assert all_right(rows), rows


@pytest.mark.thorough
def test_where_the_system_refuses_tiles_products_go_without(emulated: Path) -> None:
    state, rows = compared(emulated, TILES_ARE_REFUSED="1")
    assert state == TileState.REFUSED
    assert [row[1:] for row in rows] == [(0, 0)] * len(FORMATS)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@needs_compiler
def test_tiles_touch_nothing_but_their_memory(tmp_path: Path) -> None:
    sanitized = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    state, rows = compared(compiled(tmp_path, *sanitized, *EMULATED))
    assert state == TileState.USED
    assert all_right(rows), rows


@pytest.mark.skipif("amx_int8" not in compilation.cpu_features().split(), reason="needs a CPU with AMX")
@needs_compiler
def test_the_instructions_themselves_give_the_same_bits(tmp_path: Path) -> None:
    state, rows = compared(compiled(tmp_path, "-O3"))
    assert state in (TileState.USED, TileState.REFUSED)
    assert all_right(rows) or state == TileState.REFUSED, rows


@pytest.mark.parametrize(
    ("state", "level", "said"),
    [(1, "INFO", "go through AMX tiles"), (2, "INFO", "the system refuses them")],
)
def test_what_becomes_of_tiles_is_logged_once(
    state: int, level: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_tiles.cache_clear()
    with caplog.at_level(logging.INFO):
        for each in (state, state, 0, 3):
            log_tiles(TileState(each))
    log_tiles.cache_clear()
    assert [record.levelname for record in caplog.records] == [level]
    assert said in caplog.text

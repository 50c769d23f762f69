"""Runs every row of the table: its folder, and its GGUF files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tandem.runners.loading import transformers_logging
from tests.families.checks import Result, checked
from tests.families.rows import ROWS, Row, made

NEAR = 0.4  # standard deviations of logits: activations beside blocks have 8 bits
ANY = 99.0  # what is compared is the runner with itself
DENSE = ("F32", "F16", "BF16")
COMMON = ("F32", "F16", "Q8_0")


def matrix(rows: Sequence[Row] = ROWS, jobs: int = 2) -> list[Result]:
    """Every result, in the table's order; `jobs` processes make them."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return [result for results in pool.map(_results, rows, chunksize=4) for result in results]


def _results(row: Row) -> list[Result]:
    import torch

    torch.set_num_threads(1)
    transformers_logging()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            results.extend(_of_row(row, Path(folder)))
        except Exception as error:
            said = f"no file was made: {type(error).__name__}: {error!s:.150}"
            results.append(Result(row.family, row.variant, "", "", "", False, "wrong", said))
    return results


def _of_row(row: Row, folder: Path) -> Iterator[Result]:
    module = made(row, folder)
    kind = "sharded folder" if row.shards else "folder"
    yield checked(row, folder, kind, row.dtype, lambda: module)
    if row.dtype == "bfloat16":
        yield checked(row, folder, kind, "bfloat16 steps", lambda: module, ANY, dtype="bfloat16")
        for weights in ("int8", "q4"):
            yield checked(row, folder, kind, weights, lambda: module, ANY, weights=weights)
    if row.gguf:
        yield from _ggufs(row, folder, module)


def _ggufs(row: Row, folder: Path, module: Any) -> Iterator[Result]:
    from tests.families import gguf_files

    def result(file: str, kind: str, *files: Path) -> Result:
        near = 0 if kind in DENSE else NEAR
        return checked(row, files[0], file, kind, cache(lambda: gguf_files.reference(files, module)), near)

    given = json.loads(gguf_files.RECORDED.read_text(encoding="utf-8"))["files"][row.name]
    for kind in gguf_files.WRITTEN if row.variant == "blocks" else COMMON:
        yield result("GGUF", kind, gguf_files.write(folder / f"{kind}.gguf", module, given, kind))
    if row.variant == "blocks":
        first = gguf_files.write(folder / "split.gguf", module, given, split=20)
        yield result("split GGUF", "F32", first, *sorted(set(folder.glob("split-*.gguf")) - {first}))

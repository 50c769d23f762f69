"""Runs every row of the table: its folder, its GGUF files, and what llama.cpp makes of them where it is installed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tandem.runners.load_runner import transformers_logging
from tests.families.checks import Result, checked
from tests.families.rows import ROWS, Row, made

NEAR = 0.4  # standard deviations of logits: activations beside blocks have 8 bits
ANY = 99.0  # what is compared is the runner with itself
DENSE = ("F32", "F16", "BF16")
COMMON = ("F32", "F16", "Q8_0")


@dataclass(frozen=True)
class LlamaCpp:
    """Where llama.cpp is: its source, and its built programs if there are some."""

    source: Path
    programs: Path | None = None


Kept = dict[str, Any]


def matrix(
    rows: Sequence[Row] = ROWS, llama: LlamaCpp | None = None, jobs: int = 2
) -> tuple[list[Result], dict[str, Kept]]:
    """Every result, in the table's order, and by row what llama.cpp's converter said; `jobs` processes make them."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        found = list(pool.map(partial(_results, llama=llama), rows, chunksize=4))
    tokenizers = list(_tokenizers(llama.source)) if llama else []
    kept = {row.name: kept for row, (_, kept) in zip(rows, found, strict=True) if kept}
    return [result for results, _ in found for result in results] + tokenizers, kept


def _results(row: Row, llama: LlamaCpp | None) -> tuple[list[Result], Kept]:
    import torch

    torch.set_num_threads(1)
    transformers_logging()
    results, kept = [], Kept()
    with tempfile.TemporaryDirectory() as folder:
        try:
            results.extend(_of_row(row, Path(folder), llama, kept))
        except Exception as error:
            said = f"no file was made: {type(error).__name__}: {error!s:.150}"
            results.append(Result(row.family, row.variant, "", "", "", False, "wrong", said))
    return results, kept


def _of_row(row: Row, folder: Path, llama: LlamaCpp | None, kept: Kept) -> Iterator[Result]:
    module = made(row, folder)
    kind = "sharded folder" if row.shards else "folder"
    yield checked(row, folder, kind, row.dtype, lambda: module)
    if row.dtype == "bfloat16":
        yield checked(row, folder, kind, "bfloat16 steps", lambda: module, ANY, dtype="bfloat16")
        for weights in ("int8", "q4"):
            yield checked(row, folder, kind, weights, lambda: module, ANY, weights=weights)
    if row.gguf:
        yield from _ggufs(row, folder, module, llama, kept)


def _ggufs(row: Row, folder: Path, module: Any, llama: LlamaCpp | None, kept: Kept) -> Iterator[Result]:
    from tests.families import gguf_files

    def result(file: str, kind: str, *files: Path) -> Result:
        near = 0 if kind in DENSE else NEAR
        return checked(row, files[0], file, kind, cache(lambda: gguf_files.reference(files, module)), near)

    if llama:
        whole = gguf_files.convert(llama.source, folder, folder / "converted.gguf")
        kept |= gguf_files.recorded(whole)
        yield result("converter's GGUF", "F32", whole)
    given = kept or json.loads(gguf_files.RECORDED.read_text(encoding="utf-8"))["files"][row.name]
    for kind in gguf_files.WRITTEN if row.variant == "blocks" else COMMON:
        yield result("GGUF", kind, gguf_files.write(folder / f"{kind}.gguf", module, given, kind))
    if row.variant == "blocks":
        first = gguf_files.write(folder / "split.gguf", module, given, split=20)
        yield result("split GGUF", "F32", first, *sorted(set(folder.glob("split-*.gguf")) - {first}))
        for kind in gguf_files.QUANTISED if llama and llama.programs else ():
            made_file = gguf_files.quantised(llama.programs / "llama-quantize", whole, kind)
            yield result("llama-quantize", kind, made_file)


def _tokenizers(source: Path) -> Iterator[Result]:
    """Texts of llama.cpp's own tests in its vocabularies; the tokens are beside them."""
    from tandem.checkpoints.locate import Checkpoint, CheckpointError
    from tandem.checkpoints.tokenizers import HuggingFaceTokenizer

    for file in sorted(source.glob("models/ggml-vocab-*.gguf.inp")):
        name = file.name.removesuffix(".gguf.inp")
        texts = file.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        lines = Path(f"{str(file)[:-4]}.out").read_text().splitlines()
        blank = Result("tokenizer", name[11:], "vocabulary", f"{len(lines)} texts", "refused", False, "refused")
        try:
            tokenizer = HuggingFaceTokenizer(Checkpoint(name, str(file.parent), f"{name}.gguf"))
        except CheckpointError as error:
            yield replace(blank, said=str(error))
            continue
        pairs = [(text, [*map(int, line.split())]) for text, line in zip(texts, lines, strict=False)]
        wrong = [text for text, ids in pairs if tokenizer.tokens(text, special=False) != ids]
        said = f"{len(wrong)} texts differ, such as {wrong[0]!r:.60}" if wrong else ""
        yield replace(blank, runs="tokenizer", exact=True, verdict="wrong" if wrong else "equal", said=said)

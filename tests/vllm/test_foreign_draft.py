"""vLLM's drafter at a draft worker whose model has another tokenizer, and at vocabularies that are padded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tandem import Client
from tandem.checkpoints.locate import embedded_draft, find
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.vllm import RemoteDrafter
from tandem.vllm.settings import Form, Settings
from tests.support import HANG, ServerProcess
from tests.vllm.engine import LONGEST, vllm_config
from tests.vocabularies.foreign import write_foreign

TARGET = str(embedded_draft())
TEXT = "Count from one to thirty: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen"
WORKER = ("--role", "draft_worker", "--propose_only")
TOKENS = 40
PADDING = 128

pytestmark = pytest.mark.thorough  # real models; daily: vocabularies/test_foreign_drafts.py


@contextlib.contextmanager
def server(folder: Path, *flags: str) -> Iterator[str]:
    ours = ("--port", "0", "--dtype", "float32", "--batch", "2")
    shape = ("--sequence_length", str(LONGEST), "--threads", "1")
    process = ServerProcess(folder, *ours, *shape, *flags)
    try:
        yield process.wait_ready()
    finally:
        process.process.kill()
        process.process.wait()


def accepted(address: str, prompt: Sequence[int], truth: Sequence[int], size: int, sha256: str | None) -> int:
    """How many draft tokens an engine accepts whose target writes `truth` after the prompt."""
    settings = Settings((address,), Form.WAITING, 1000.0 * HANG, HANG, lookup=0, tokenizer_sha256=sha256)
    ids, length, agreed = np.array([[*prompt, *truth]], np.int32), len(prompt) + 1, 0
    with contextlib.closing(RemoteDrafter(vllm_config(vocab_size=size), settings)) as asked:
        new = truth[:1]
        while length < ids.shape[1]:
            (draft,) = asked.propose([list(new)], [length], ids)
            rest = truth[length - len(prompt) :]
            same = next((at for at, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), len(draft))
            same = min(same, len(rest) - 1)
            new, length, agreed = rest[: same + 1], length + same + 1, agreed + same
        assert asked.counts.get("errors") == 0
    return agreed


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_foreign(tmp_path_factory.mktemp("foreign"), padding=64))


@pytest.fixture(scope="module")
def here() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(find(TARGET))


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ...]:
    """What the shipped draft, as a target, writes after the text."""
    flags = ("--role", "target", "--model", TARGET)
    with server(tmp_path_factory.mktemp("target"), *flags) as address, Client(address) as client:
        return client.generate(TEXT, None, max_new_tokens=TOKENS, ignore_end_of_sequence=True).token_ids


def test_a_worker_with_another_tokenizer_drafts_in_the_target_s_tokens(
    tmp_path: Path, foreign: str, here: HuggingFaceTokenizer, truth: tuple[int, ...]
) -> None:
    """The foreign draft is the target by other ids, so that nearly all that it drafts is accepted."""
    prompt = here.encode(TEXT, chat=False)
    pair = ("--foreign_draft", "--target_model", TARGET, "--draft_model", foreign, "--draft", "model")
    with server(tmp_path, *WORKER, *pair) as address:
        for size, sha256 in ((here.vocab_size, here.sha256), (here.vocab_size + PADDING, None)):
            assert accepted(address, prompt, truth, size, sha256) > 0.6 * TOKENS, (size, sha256)


def test_a_worker_with_another_tokenizer_that_was_not_told_so_is_not_used(
    tmp_path: Path, foreign: str, here: HuggingFaceTokenizer, truth: tuple[int, ...]
) -> None:
    prompt = here.encode(TEXT, chat=False)
    with server(tmp_path, *WORKER, "--draft_model", foreign, "--draft", "model") as address:
        assert accepted(address, prompt, truth, here.vocab_size, here.sha256) == 0
        assert accepted(address, prompt, truth, here.vocab_size + 2 * 512, None) == 0

"""A draft model with another tokenizer, in real processes. It is the target by other ids, so that all drafts fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import Client, SamplingParams
from tandem.checkpoints.locate import Checkpoint, embedded_draft, find
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tandem.vocabularies.mapping import Prefix
from tandem.vocabularies.reading import translated
from tests.support import ServerProcess
from tests.vocabularies.foreign import write_foreign

PROMPTS = (
    "Count from one to twenty: one, two, three,",
    "Wie schön ist es, früh aufzustehen und 語 zu lernen?\n\n  - ",
    "<|im_start|>user\nWhat is 12 * 12?<|im_end|>\n<|im_start|>assistant\n",
)
TARGET = str(embedded_draft())
WAITS = ("--pipeline", "off")
DRAFTED: dict[str, Any] = {"max_new_tokens": 24, "speculation_length": 3, "ignore_end_of_sequence": True}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3)


@contextlib.contextmanager
def server(folder: Path, name: str, *flags: str) -> Iterator[ServerProcess]:
    ours = ("--port", "0", "--dtype", "float32", "--batch", "2", "--sequence_length", "160", "--threads", "1")
    process = ServerProcess(folder, *ours, *flags, ready_file=f"{name}.json")
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def test_a_vocabulary_by_other_ids_is_translated_token_by_token(tmp_path: Path) -> None:
    here = HuggingFaceTokenizer(find(TARGET))
    pair = translated(here, HuggingFaceTokenizer(Checkpoint("foreign", write_foreign(tmp_path, weights=False))))
    assert pair is not None and len(pair.back) == here.vocab_size and len({*pair.back.values()}) == here.vocab_size
    for prompt in PROMPTS:
        tokens, prefix = here.encode(prompt, chat=False), Prefix(pair)
        followed = [prefix.follow(tokens[:length]) for length in range(1, len(tokens) + 1)]
        assert followed[-1] is not None and pair.drafted(followed[-1]) == tuple(tokens)
    assert translated(here, here) is None


@pytest.mark.thorough
def test_a_foreign_draft_is_accepted_in_all_architectures_and_changes_no_token(tmp_path: Path) -> None:
    foreign = str(write_foreign(tmp_path / "foreign", padding=128))
    pair = ("--target_model", TARGET, "--draft_model", foreign, "--draft", "model")
    with contextlib.ExitStack() as stack:

        def started(name: str, *flags: str) -> ServerProcess:
            return stack.enter_context(server(tmp_path, name, *flags))

        mixed = started("mixed", "--role", "draft_worker", "--propose_only", *pair)
        worker = started("worker", "--role", "draft_worker", "--propose_only", "--foreign_draft", *pair)
        plain = started("plain", "--role", "target", "--model", TARGET).wait_ready()
        fused = started("fused", "--role", "fused_target", "--foreign_draft", *pair)
        driven = started("driven", "--role", "target", "--model", TARGET, "--draft_host", worker.wait_ready(), *WAITS)
        own = ("--foreign_draft", *pair, "--target_host", plain, *WAITS)
        drafting = started("drafting", "--role", "draft_worker", *own)
        refused = started("refused", "--role", "target", "--model", TARGET, "--draft_host", mixed.wait_ready())
        with Client(plain) as client:
            expected = {
                (prompt, sampled): client.generate(prompt, SAMPLED if sampled else None, **DRAFTED).token_ids
                for prompt in PROMPTS
                for sampled in (False, True)
            }
        for process in (fused, driven, drafting):
            drafted = accepted = 0
            with Client(process.wait_ready()) as client:
                for (prompt, sampled), token_ids in expected.items():
                    said = client.generate(prompt, SAMPLED if sampled else None, **DRAFTED)
                    assert said.token_ids == token_ids
                    drafted += 0 if sampled else said.statistics.drafted
                    accepted += 0 if sampled else said.statistics.accepted
            assert accepted > 0.8 * drafted > 20, (process.log.name, accepted, drafted)
        assert refused.process.wait(60) == 2 and "must share a vocabulary" in refused.log.read_text()

"""The fingerprint by which draft and target know each other, incremental text, and missing tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.checkpoints.locate import Checkpoint, CheckpointError
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer, fingerprint

VOCABULARY = {"a": 0, "b": 1, "<end>": 2}


@pytest.mark.parametrize(
    ("vocabulary", "special", "same"),
    [
        ({"<end>": 2, "b": 1, "a": 0}, [2], True),
        ({"a": 1, "b": 0, "<end>": 2}, [2], False),
        ({"a": 0, "b": 1, "<END>": 2}, [2], False),
        ({**VOCABULARY, "c": 3}, [2], False),
        (VOCABULARY, [1], False),
    ],
    ids=["in another order", "swapped", "renamed", "larger", "other special"],
)
def test_fingerprints_are_equal_if_ids_mean_the_same(
    vocabulary: dict[str, int], special: list[int], same: bool
) -> None:
    assert (fingerprint(vocabulary, special) == fingerprint(VOCABULARY, [2])) == same


def word_level(folder: Path) -> Checkpoint:
    """A tokenizer of five words."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"hello": 0, "world": 1, "<unk>": 2, "<end>": 3, "again": 4}
    end = {"id": 3, "content": "<end>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document = {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Checkpoint("words", str(folder))


def test_a_draft_that_pads_with_another_token_has_the_targets_vocabulary(tmp_path: Path) -> None:
    target = HuggingFaceTokenizer(word_level(tmp_path / "m"))
    for role, same in (("pad_token", True), ("bos_token", False)):
        other = word_level(tmp_path / role)
        file = tmp_path / role / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), role: "again"}))
        draft = HuggingFaceTokenizer(other)
        assert (draft.sha256 == target.sha256) == same and 4 in draft.special_ids


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="no usable tokenizer") as caught:
        HuggingFaceTokenizer(Checkpoint("m", str(tmp_path)))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)

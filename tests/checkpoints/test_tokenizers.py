"""The fingerprint by which draft and target know each other, incremental text, and missing tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.checkpoints.locate import Checkpoint, CheckpointError
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer, fingerprint

VOCABULARY = {"a": 0, "b": 1, "<end>": 2}


def test_equal_vocabularies_have_one_fingerprint_in_any_order() -> None:
    shuffled = {"<end>": 2, "b": 1, "a": 0}
    assert fingerprint(VOCABULARY, [2, 1]) == fingerprint(shuffled, [1, 2])
    assert len(fingerprint(VOCABULARY, [2])) == 64


@pytest.mark.parametrize(
    ("vocabulary", "special"),
    [
        ({"a": 1, "b": 0, "<end>": 2}, [2]),
        ({"a": 0, "b": 1}, [2]),
        ({"a": 0, "b": 1, "<END>": 2}, [2]),
        ({**VOCABULARY, "c": 3}, [2]),
        (VOCABULARY, []),
        (VOCABULARY, [1]),
    ],
    ids=["swapped", "smaller", "renamed", "larger", "no special", "other special"],
)
def test_another_vocabulary_has_another_fingerprint(vocabulary: dict[str, int], special: list[int]) -> None:
    assert fingerprint(vocabulary, special) != fingerprint(VOCABULARY, [2])


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


def test_a_folders_tokenizer_encodes_ends_and_streams(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(word_level(tmp_path / "m"))
    assert tokenizer.encode("hello world", chat=False) == [0, 1]
    assert tokenizer.end_of_sequence_ids == (3,)
    stream = tokenizer.stream()
    assert "".join([*(stream.push(t) for t in (0, 1, 3)), stream.flush()]).split() == ["hello", "world"]
    assert tokenizer.sha256 == HuggingFaceTokenizer(word_level(tmp_path / "again")).sha256


def test_a_draft_that_pads_with_another_token_has_the_targets_vocabulary(tmp_path: Path) -> None:
    target = HuggingFaceTokenizer(word_level(tmp_path / "m"))
    for role, same in (("pad_token", True), ("bos_token", False)):
        other = word_level(tmp_path / role)
        file = tmp_path / role / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), role: "again"}))
        draft = HuggingFaceTokenizer(other)
        assert (draft.sha256 == target.sha256) == same and 4 in draft.special_ids


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(word_level(tmp_path / "m"))
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode("hello", chat=True)
    (tmp_path / "m" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} again{% endfor %}")
    templated = HuggingFaceTokenizer(Checkpoint("words", str(tmp_path / "m")))
    assert templated.encode("hello", chat=True) == [0, 4]
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ raise_exception('not a user') }}")
    refusing = HuggingFaceTokenizer(Checkpoint("words", str(tmp_path / "m")))
    with pytest.raises(ValueError, match="chat template refuses them: not a user"):
        refusing.encode("hello", chat=True)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="no usable tokenizer") as caught:
        HuggingFaceTokenizer(Checkpoint("m", str(tmp_path)))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)

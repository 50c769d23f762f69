"""One model's training data in another's tokens: the same text, asked in the other's template."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.checkpoints.locate import find, weights_revision
from tandem.training.retell import Teller, main, retell, retold
from tandem.training.shards import Answered, ShardFolder, join, split

THEIRS = "<u>{{ messages[0]['content'] }}</u>{% if add_generation_prompt %}<a>{% endif %}"
OURS = "[{{ messages[0]['content'] }}]{% if add_generation_prompt %}:{% endif %}"


def tokenizer(template: str | None, merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Bytes, and the pairs of them that are one token."""
    symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    wrapped.chat_template = template
    return wrapped


SPEAKER, LISTENER = tokenizer(THEIRS, []), tokenizer(OURS, [("a", "b"), ("c", "d")])


def answered(prompt: str, answer: str, end: bool = False) -> Answered:
    ids = SPEAKER(answer)["input_ids"] + [0] * end
    best = np.tile(np.array(ids, np.int32)[:, None], (1, 24))
    asked = np.array(SPEAKER(prompt)["input_ids"], np.int32)
    return Answered("code", 0.6, asked, np.array(ids, np.int32), best, np.zeros(best.shape, np.float16))


@pytest.mark.parametrize(
    ("prompt", "again"),
    [("<u>say xy</u><a>", "[say xy]:"), ("count xy", "count xy"), ("<u>say", "<u>say")],
    ids=["a chat", "a text", "a text that begins like one"],
)
def test_the_same_is_said_after_the_same_question(prompt: str, again: str) -> None:
    found = retold(answered(prompt, "abcd.", end=True), Teller(SPEAKER), Teller(LISTENER))
    assert found is not None
    assert LISTENER.decode(found.prompt) == again
    assert LISTENER.decode(found.answer[:-1]) == "abcd." and found.answer[-1] == 0
    assert len(found.answer) == 4  # ab cd . end
    assert found.ids.shape == found.logprobs.shape == (4, 1) and not found.logprobs.any()
    assert (found.kind, found.temperature) == ("code", np.float32(0.6)) or found.temperature == 0.6


def test_a_token_that_spans_prompt_and_answer_belongs_to_the_answer() -> None:
    found = retold(answered("xa", "bcd"), Teller(SPEAKER), Teller(LISTENER))
    assert found is not None
    assert LISTENER.decode(found.prompt) == "x"
    assert [LISTENER.decode([token]) for token in found.answer] == ["ab", "cd"]


def test_a_chat_whose_beginning_was_cut_off_is_left_out() -> None:
    assert retold(answered("ay xy</u><a>", "ab"), Teller(SPEAKER), Teller(LISTENER)) is None


def model_folder(folder: Path, made: PreTrainedTokenizerFast) -> Path:
    made.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(folder.name.encode())
    return folder


def test_shards_are_written_for_the_new_target_and_refused_for_another_speaker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker, listener = model_folder(tmp_path / "speaker", SPEAKER), model_folder(tmp_path / "listener", LISTENER)
    data = ShardFolder(tmp_path / "data")
    data.claim({"target": weights_revision(find(str(speaker)))})
    data.write(3, join([answered("xy", "abcd"), answered("<u>xy</u><a>", "ab", end=True)]))
    output = tmp_path / "retold"
    assert retell(data.folder, str(speaker), str(listener), output, lambda line: None) == 4
    assert ShardFolder(output).meta()["target"] == weights_revision(find(str(listener)))
    assert [len(one.answer) for one in split(ShardFolder(output).read(3))] == [2, 2]
    flags = ["--data", str(data.folder), "--said_by", str(listener), "--output", str(tmp_path / "other")]
    assert main([*flags, "--target_model", str(listener)]) == 2
    assert "was said by sha256:" in capsys.readouterr().err

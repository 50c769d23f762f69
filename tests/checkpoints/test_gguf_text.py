"""Text becomes the tokens that llama.cpp makes of it, for each kind of vocabulary that a GGUF file can have."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.gguf_tokenizer import rules
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.tokenizers import HuggingFaceTokenizer
from tests.checkpoints.test_tokenizer_parity import tokenizer_file

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("llama_text.json").read_text(encoding="utf-8"))
"""Vocabularies, texts, and digests of the tokens that llama.cpp made of them; `how` it was done."""
FLAGS: tuple[dict[str, Any], ...] = ({}, {"add_bos_token": False, "add_eos_token": True})
ENDS = {"bos": "endoftext", "eos": "im_end"}
CASES: dict[str, dict[str, Any]] = {
    **{pre: {"pre": pre} for pre in rules()["splits"]},
    "no pre": {},
    "llama-bpe that ends texts": {"pre": "llama-bpe", **FLAGS[1]},
    "qwen2 that begins texts": {"pre": "qwen2", "add_bos_token": True},
    "SentencePiece": {"model": "llama"},
    "SentencePiece without a prefix": {"model": "llama", "add_space_prefix": False},
    "SentencePiece that ends texts": {"model": "llama", **FLAGS[1]},
    "SentencePiece of Phi 3": {"model": "llama", "general.name": "Phi-3 mini"},
}


def values_of(case: dict[str, Any]) -> dict[str, Any]:
    if case.get("model") != "llama":
        given = RECORDED["byte level"]
        common = {"model": "gpt2", "tokens": given["tokens"], "token_type": given["kinds"], "merges": given["merges"]}
        ends = {f"{name}_token_id": given["tokens"].index(f"<|{text}|>") for name, text in ENDS.items()}
        return {**common, **ends, **case}
    tokens = RECORDED["pieces"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 262), 3, 3, 4]
    scores = [0.0] * 259 + [-float(place) for place in range(len(tokens) - 259)]
    return {"tokens": tokens, "token_type": kinds, "scores": scores, **case}


def digest(tokens: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", CASES)
def test_text_becomes_the_tokens_of_llama_cpp(name: str, tmp_path: Path) -> None:
    values = values_of(CASES[name])
    tokenizer = HuggingFaceTokenizer(tokenizer_file(tmp_path / "m.gguf", "llama", **values))
    assert digest([tokenizer.encode(text, chat=False) for text in RECORDED["texts"]]) == RECORDED["digests"][name]
    assert tokenizer.vocab_size == len(values["tokens"])


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model": "bert"}, "tokenizer.ggml.model: 'bert'"),
    ({"pre": "kimi-k2"}, "tokenizer.ggml.pre: 'kimi-k2'"),
    ({"pre": "qwen2", "speech": "loud"}, "tokenizer.ggml.speech: 'loud' is not known"),
    ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens: 'a' stands twice"),
    ({"bos_token_id": None, "add_bos_token": True}, "tokenizer.ggml.bos_token_id: is missing"),
    ({"eos_token_id": 5000}, "tokenizer.ggml.eos_token_id: 5000"),
    ({"chat_template": 5}, "tokenizer.chat_template: 5 is not a text"),
    ({"model": "llama", "tokens": ["a", "b" * 9999], "scores": [0.0] * 2, "merges": None}, "one has 9999 characters"),
)


@pytest.mark.parametrize(("changed", "reason"), REFUSED)
def test_what_is_not_known_is_refused_by_name(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        values = {name: value for name, value in (values_of({}) | changed).items() if value is not None}
        HuggingFaceTokenizer(tokenizer_file(tmp_path / "m.gguf", "llama", **values))
    assert reason in str(caught.value) and "\n" not in str(caught.value)

"""What a model's generation_config.json says of sampling, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.generation_config import generation_defaults
from tandem.checkpoints.locate import Checkpoint, CheckpointError
from tandem.engine.generator import RequestDefaults
from tandem.speculation.types import SamplingParams

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "seed": 3}


def said(folder: Path, content: Any) -> dict[str, Any]:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return generation_defaults(Checkpoint("m", str(folder)))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}),
        ({"temperature": 1, "min_p": None, "eos_token_id": [1, 2]}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True, "max_new_tokens": 99}, {"temperature": 1.0, "max_new_tokens": 99}),
        ({}, {}),
    ],
)
def test_the_fields_of_the_file_are_read(tmp_path: Path, content: Any, found: dict[str, Any]) -> None:
    assert said(tmp_path, content) == found


def test_a_model_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert generation_defaults(Checkpoint("m", str(tmp_path))) == {}
    assert generation_defaults(Checkpoint("", "toy")) == {}
    assert generation_defaults(Checkpoint("org/none", "org/none")) == {}
    said(tmp_path, QWEN)
    assert generation_defaults(Checkpoint("m", str(tmp_path), "model.gguf")) == {}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"temperature": "hot" * 99}, "temperature: 'hot.* is not a number"),
        ({"top_k": 2.5}, "top_k: '2.5' is not a whole number"),
        ({"top_p": True}, "top_p: 'True' is not a number"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 is below 1"),
        ({"do_sample": "yes"}, "do_sample: 'yes' is neither"),
        ('{"temperature": 1e999}', "'temperature' is inf"),
        ("[]", "not an object"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_field(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=f"generation_config.json: .*{why}.*--generation_config none") as caught:
        said(tmp_path, content)
    assert len(str(caught.value)) < 400


def test_what_the_operator_gives_comes_before_the_models_file() -> None:
    operator = RequestDefaults(SamplingParams(top_p=0.5), None, {"top_p": "--top_p"})
    both = operator.over({"top_p": 0.9, "temperature": 0.6, "max_new_tokens": 9}, "file")
    assert both.sampling == SamplingParams(top_p=0.5, temperature=0.6) and both.max_new_tokens == 9
    assert str(both) == "top_p 0.5 (--top_p), temperature 0.6 (file), max_new_tokens 9 (file)"
    assert str(RequestDefaults()) == "Tandem's own: greedy, for OpenAI clients temperature 1"
    assert (both.given("temperature", 1.0), both.given("min_p", 1.0)) == (0.6, 1.0)

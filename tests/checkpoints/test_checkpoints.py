"""Finding weights, and what generation_config.json says: every refusal names the file and what is wrong with it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

import tandem.checkpoints.locate as checkpoints
from tandem.checkpoints.generation_config import generation_defaults
from tandem.checkpoints.locate import Checkpoint, CheckpointError, find, weights_revision
from tandem.engine.generator import RequestDefaults
from tandem.engine.model_config import DraftChoice
from tandem.speculation.types import SamplingParams


def model_folder(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def refusal(model: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        find(str(model))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("weights", ["model__safetensors", "pytorch_model__bin", "model__bin"])
def test_a_folder_with_a_config_and_weights_is_found(tmp_path: Path, weights: str) -> None:
    folder = model_folder(tmp_path / "m", **{weights: b"w"})
    assert find(str(folder)) == Checkpoint("m", str(folder))
    assert find(str(folder)).source == {"pretrained_model_name_or_path": str(folder)}


def test_a_gguf_file_is_found_alone_and_as_the_only_one_in_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4.gguf"
    file.write_bytes(b"GGUFrest")
    for name in (file, tmp_path):
        found = find(str(name))
        assert found == Checkpoint("model.Q4", str(tmp_path), "model.Q4.gguf")
        assert found.source["gguf_file"] == "model.Q4.gguf"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert "config.json" in refusal(tmp_path)


def test_a_hub_id_is_left_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find("owner/name") == Checkpoint("owner/name", "owner/name")
    assert weights_revision(Checkpoint("owner/name", "owner/name")) == "hub:owner/name"
    for not_one in ("./a", "/a", "a", "a/b/c", "~/a", "../a"):
        assert "no such model folder" in refusal(not_one)


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", model__safetensors=b"w")
    (folder / "config.json").write_text("{")
    assert "config.json: not valid JSON" in refusal(folder)
    (folder / "config.json").unlink()
    assert f"{folder / 'config.json'}: missing" in refusal(folder)
    assert "no weights" in refusal(model_folder(tmp_path / "bare"))
    file = tmp_path / "weights.pt"
    file.write_bytes(b"x")
    assert "neither a model folder nor a .gguf file" in refusal(file)
    (tmp_path / "bad.gguf").write_bytes(b"PK\x03\x04")
    assert "bad.gguf: not a GGUF file" in refusal(tmp_path / "bad.gguf")
    assert "gone.gguf: no such file" in refusal(tmp_path / "gone.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    assert "empty.gguf: not a GGUF file" in refusal(tmp_path / "empty.gguf")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_missing_shard_is_named_with_its_index(tmp_path: Path, kind: str) -> None:
    stem = "model" if kind == "safetensors" else "pytorch_model"
    folder = model_folder(tmp_path / "m", **{f"{stem}-1__{kind}": b"w"})
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": f"{stem}-1.{kind}", "b": f"{stem}-2.{kind}"}}))
    message = refusal(folder)
    assert str(folder / f"{stem}-2.{kind}") in message and index.name in message
    (folder / f"{stem}-2.{kind}").write_bytes(b"w")
    assert find(str(folder)).name == "m"


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    folder = model_folder(tmp_path / "m", model__safetensors=b"w")
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: not a valid weight index" in refusal(folder)


def test_without_the_embedded_model_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"^no model named .*: pass --model, or run: make setup$"):
        find(None)


def package(monkeypatch: pytest.MonkeyPatch, name: str, folder: Path) -> None:
    """Lets a package in `folder` be installed, and no other."""
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: spec if asked == name else None)


def test_weights_are_found_in_their_own_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, checkpoints.WEIGHTS_PACKAGE, tmp_path)
    monkeypatch.setattr(checkpoints, "EMBEDDED_DRAFT", tmp_path / "nowhere" / "embedded_draft")
    monkeypatch.setattr(checkpoints, "EMBEDDED_HEAD", tmp_path / "nowhere" / "embedded_head")
    assert (checkpoints.embedded_draft(), checkpoints.embedded_head()) == (None, None)
    with pytest.raises(CheckpointError, match="the embedded one is not installed"):  # only a draft is
        find(None)
    draft, target = model_folder(tmp_path / "embedded_draft"), tmp_path / checkpoints.EMBEDDED_TARGET
    target.mkdir()
    with pytest.raises(CheckpointError, match="the embedded one is not installed"):
        find(None)
    (target / checkpoints.EMBEDDED_FILE).write_bytes(b"GGUF")
    assert checkpoints.embedded_draft() == str(draft)
    assert find(None) == Checkpoint("SmolLM2-135M-Instruct", str(target), checkpoints.EMBEDDED_FILE)


def test_a_draft_or_head_that_is_not_installed_is_refused_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(monkeypatch, checkpoints.WEIGHTS_PACKAGE, tmp_path)
    for name in ("EMBEDDED_DRAFT", "EMBEDDED_HEAD"):
        monkeypatch.setattr(checkpoints, name, tmp_path / "nowhere" / name)
    for kind, what in (("hybrid", "draft model"), ("model", "draft model"), ("eagle", "EAGLE head")):
        with pytest.raises(CheckpointError, match=f"^draft: the {what} that Tandem ships is not installed: make setup"):
            DraftChoice(kind).resolve()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Above 2 GiB heads and tails alone were hashed once.
LARGE = [pytest.param((2 << 30) + (48 << 20), 1 << 30, marks=pytest.mark.thorough), (64 << 20, 32 << 20), (64 << 20, 0)]


@pytest.mark.parametrize(("size", "at"), LARGE)
def test_of_a_large_file_every_byte_counts(tmp_path: Path, cache: Path, size: int, at: int) -> None:
    """The disk holds nothing of it but one byte."""
    file = model_folder(tmp_path / "m", model__safetensors=b"") / "model.safetensors"
    os.truncate(file, size)
    before = weights_revision(find(str(tmp_path / "m")))
    with file.open("r+b") as changed:
        changed.seek(at)
        changed.write(b"x")
    assert before.startswith("sha256:") and weights_revision(find(str(tmp_path / "m"))) != before


def test_a_revision_is_a_function_of_weights_and_configuration(tmp_path: Path, cache: Path) -> None:
    folder = model_folder(tmp_path / "m", model__safetensors=b"w", notes__md=b"notes")
    seen = [weights_revision(find(str(folder)))]
    (folder / "notes.md").write_text("other notes")
    assert weights_revision(find(str(folder))) == seen[0]
    for name, text in (
        ("config.json", '{"rope_theta": 1e6}'),
        ("generation_config.json", '{"eos_token_id": 7}'),
        ("model.safetensors", "v"),
    ):
        (folder / name).write_text(text)
        seen.append(weights_revision(find(str(folder))))
    assert len(set(seen)) == 4


def test_the_revision_of_the_embedded_target_is_the_one_its_draft_was_trained_for() -> None:
    noted = json.loads((checkpoints.EMBEDDED_DRAFT / "training.json").read_text())["target"]
    assert weights_revision(find(None)) == noted


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

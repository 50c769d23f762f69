"""The matrix of models: no row is wrong in silence or ends in a traceback, and docs/models.md says what was found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.families import page
from tests.families.checks import Result, checked
from tests.families.gguf_files import RECORDED, write, write_tokenizer
from tests.families.matrix import matrix
from tests.families.rows import ROWS, made

RECORD: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
NAMED = {row.name: row for row in ROWS}


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_no_row_is_wrong_and_the_page_says_what_was_found() -> None:
    found, _ = matrix()
    assert not [each for each in found if each.failed]
    results = found + [Result(**each) for each in RECORD["results"]]
    assert page.text(results) == page.PAGE.read_text(encoding="utf-8"), "make families ARGS=--record writes the page"


@pytest.mark.parametrize(
    ("loaded", "computed"),
    [
        ("llama llama3", "llama plain"),
        ("llama yarn", "llama plain"),
        ("phi3 window", "phi3 plain"),
        ("phi3 longrope", "phi3 plain"),
    ],
)
def test_a_model_other_than_its_reference_is_found(loaded: str, computed: str, tmp_path: Path) -> None:
    """Weights are equal, so that configurations alone differ."""
    import torch
    from transformers import AutoModelForCausalLM

    made(NAMED[loaded], tmp_path)
    other = made(NAMED[computed], tmp_path / "other")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    other.load_state_dict(weights, strict=False)
    assert checked(NAMED[loaded], tmp_path, "folder", "float32", lambda: other).verdict == "wrong"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "main.py", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mamba2 plain", "deepseek_v3 plain", "nonesuch unknown"])
def test_a_refusal_of_a_process_is_one_line_with_exit_code_2(name: str, tmp_path: Path) -> None:
    made(NAMED[name], tmp_path)
    done = run("--role", "target", "--port", "0", "--model", str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("main.py: ") and NAMED[name].family in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gemma2 tight caps", "llama llama3"])
def test_a_process_answers_with_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    import torch
    from tokenizers import Tokenizer

    module = made(NAMED[name], tmp_path)
    write_tokenizer(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = torch.tensor([backend.encode("the tiniest of sorts").ids])
    out = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    theirs = out[0, ids.shape[1] :].tolist()
    model = write(tmp_path / "m.gguf", module, RECORD["files"][name])
    for path in (tmp_path, model):
        words = ("--prompt", "the tiniest of sorts", "--max_new_tokens", "24", "--dtype", "float32", "--device", "cpu")
        done = run("--role", "verify_target", "--model", str(path), *words)
        assert [int(each) for each in re.findall(r"^token (\d+):", done.stdout, re.MULTILINE)] == theirs, done.stderr

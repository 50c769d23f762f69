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
from tests.families.checks import Result
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


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "main.py", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


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

"""A receipt of one build of the native steps is checked by another build, for other instructions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandem import Client, SamplingParams
from tandem.checkpoints.locate import EMBEDDED_DRAFT
from tandem.receipts.checking import CheckOutcome
from tandem.receipts.keys import Keys, open_keys
from tandem.receipts.receipt import prefix_digests, read_signed
from tandem.runners.native import compilation
from tandem.runners.native.compilation import LEVELS, PACKAGE, file_name
from tests.support import MAIN, REPOSITORY, ServerProcess

PROMPT = "The rivers of Europe"
SAMPLED = SamplingParams(temperature=0.8, seed=11, repetition_penalty=1.1)


def other_build(folder: Path) -> dict[str, str]:
    """Compiles the steps for fewer instructions than this CPU has; returns the environment that finds them."""
    here = frozenset(compilation.cpu_features().split())
    level = next(level for level in LEVELS if level.needs <= here)
    march = ["-march=x86-64-v2", "-mfma"] if level.name == "avx2" else ["-march=x86-64-v3"]
    package = folder / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    library = package / file_name(level, compilation.sources_hash())
    instead = {"-march=native": march, "-O3": ["-O1"]}  # which compiles sooner, to the same bits
    compilation.build(
        compilation.find_compiler(), [new for flag in compilation.FLAGS for new in instead.get(flag, [flag])], library
    )
    found = os.environ | {"PYTHONPATH": f"{folder}:{REPOSITORY}"}
    asked = "from tandem.runners.native.compilation import library_path; print(library_path())"
    said = subprocess.run([sys.executable, "-c", asked], env=found, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(library)
    return found


@pytest.mark.thorough  # compiles the native steps
@pytest.mark.timeout(900)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 CPU")
def test_another_build_draws_every_token_of_a_receipt_again_and_finds_a_forged_one(tmp_path: Path) -> None:
    environment = other_build(tmp_path)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    model = ("--model", str(EMBEDDED_DRAFT))
    serving = ("--role", "fused_target", "--draft", "ngram", *model, "--port", "0", "--receipt_keys", "keys")
    server = ServerProcess(tmp_path, *serving, "--weights", "int8", "--batch", "2", "--sequence_length", "256")
    try:
        with Client(server.wait_ready(300)) as client:
            receipt = client.generate(PROMPT, SAMPLED, max_new_tokens=150, receipt=True).receipt
    finally:
        server.process.kill()
        server.process.wait()
    signed = read_signed(receipt)
    assert signed.receipt.model.dtype == "int8/float32"

    def checked(text: str) -> tuple[int, str]:
        (tmp_path / "receipt.json").write_text(text)
        asked = ("check", "receipt.json", "--prompt", "prompt.txt", "--json", *model)
        command = [sys.executable, MAIN, *asked]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return ran.returncode, ran.stdout or ran.stderr

    code, said = checked(receipt)
    assert code == 0 and {"what": "arithmetic", "outcome": "right"}.items() <= json.loads(said)["findings"][-2].items()
    keys: Keys = open_keys(tmp_path / "keys", 90)
    tokens = list(signed.receipt.token_ids)
    tokens[-2] ^= 1
    digests = prefix_digests(signed.receipt.prompt_digest, tokens)
    forged = replace(signed.receipt, token_ids=tuple(tokens), digests=digests)
    code, said = checked(keys.signed(forged, signed.salt).text)
    assert code == CheckOutcome.FORGED and f"output token {len(tokens) - 2} is" in said

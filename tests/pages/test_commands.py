"""Every command of every page is understood by the program that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import checks
from tests.pages.commands import ROOT, Command, commands_of

PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
)
OF_ROWS = [
    Command(checks.SEEDS, code)
    for row in re.findall(r"^\| .* \| (.*) \|$", checks.SEEDS.read_text(encoding="utf-8"), re.MULTILINE)
    for code in re.findall(r"`([^`]+ [^`]+)`", row)
    if code.split()[0] in ("python", "torchrun", *checks.OTHERS)
]
COMMANDS = [command for page in PAGES for command in commands_of(page) if command.kind == "bash"] + OF_ROWS


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page.stem}: {command.line[:60]}")
def test_a_command_of_a_page_is_understood(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check(command, monkeypatch)


WRONG = {
    "a flag that a role does not have": "python main.py --role target --backend nxdi --fused_qkv",
    "a field that NxD Inference does not have": "python main.py --role target --backend nxdi --tp_degree 2 --batch 1 "
    "--sequence_length 128 --speculation_length 4 --dtype bfloat16 --model /m --neuron_config '{\"fused_qkvs\": true}'",
    "another number of processes than the degree": "torchrun --nproc-per-node 4 main.py --role fused_target "
    "--device neuron --tp_degree 8 --target_model /m --draft_model /m",
    "an overlay that does not exist": "kubectl apply -k deploy/k8s/overlays/fussed",
    "a requirements file that does not exist": "pip install -r requirements-nxd.txt",
    "an unknown program": "terraform apply",
    "a field that the API does not have": "curl http://127.0.0.1:8080/v1/completions -H "
    '"Content-Type: application/json" -d \'{"max_token": 1}\'',
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_a_wrong_command_is_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, OSError, SystemExit, ValueError)):
        checks.check(Command(Path("trn2.md"), line), monkeypatch)

"""Every command of every recipe page is run or checked; a wrong one fails the walk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.page import PAGES
from tests.recipes.walk import Step, place_of, walk


def unsettled(steps: list[Step]) -> list[tuple[str, str]]:
    return [(step.command.line, step.how) for step in steps if step.verdict not in ("ran", "checked")]


WRONG = {
    "a flag that a role does not have": "python main.py --role target --backend nxdi --fused_qkv",
    "a field that NxD Inference does not have": "python main.py --role target --backend nxdi --tp_degree 2 --batch 1 "
    "--sequence_length 128 --speculation_length 4 --dtype bfloat16 --model /m --neuron_config '{\"fused_qkvs\": true}'",
    "a K that contradicts the other": "python main.py --role fused_target --backend nxdi --tp_degree 2 --batch 1 "
    "--sequence_length 128 --speculation_length 7 --dtype bfloat16 --target_model /m --draft_model /m "
    "--neuron_config '{\"speculation_length\": 7}'",
    "another number of processes than the degree": "torchrun --nproc-per-node 4 main.py --role fused_target "
    "--device neuron --tp_degree 8 --target_model /m --draft_model /m",
    "an overlay that does not exist": "kubectl apply -k deploy/k8s/overlays/fussed",
    "a requirements file that does not exist": "pip install -r requirements-nxd.txt",
    "a program that nobody looked up": "terraform apply",
    "a field that the API does not have": "curl http://127.0.0.1:8080/v1/completions -H "
    '"Content-Type: application/json" -d \'{"max_token": 1}\'',
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_a_wrong_command_is_neither_run_nor_checked(line: str, tmp_path: Path) -> None:
    page = tmp_path / "trn2.md"
    page.write_text(f"```bash\n{line}\n```\n", encoding="utf-8")
    assert len(unsettled(list(walk(page, None)))) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all pages are walked: what one has compiled, the next finds, as on a reader's machine."""
    return tmp_path_factory.mktemp("pages")


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_walked(page: Path, folder: Path) -> None:
    steps = list(walk(page, place_of(page, folder)))
    assert unsettled(steps) == []
    assert sum(step.verdict == "ran" for step in steps) >= 10


@pytest.mark.thorough
def test_a_command_that_fails_when_it_runs_is_noticed(tmp_path: Path) -> None:
    """It parses: only running it tells that nothing listens there."""
    page = tmp_path / "page.md"
    line = "python main.py --role fused_client --target_host 127.0.0.1 --port 50053 --prompt x --reconnect_seconds 0"
    page.write_text(f"```bash\n{line}\n```\n", encoding="utf-8")
    (step,) = walk(page, place_of(page, tmp_path))
    assert step.verdict == "failed" and "UNAVAILABLE" in step.how

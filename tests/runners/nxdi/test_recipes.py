"""Every command of the recipes with --backend nxdi asks for something that NxDI can do."""

from __future__ import annotations

import re
import shlex

import pytest

from tandem.cli import main
from tandem.cli.models import model_config
from tandem_nxdi.build import Kind, plan_build
from tandem_nxdi.load import _request
from tests.support import REPOSITORY

LINES = sorted(
    {
        command[command.index("main.py ") :]
        for page in (REPOSITORY / "docs").rglob("*.md")
        for line in page.read_text(encoding="utf-8").splitlines()
        for command in line.split("`")  # of a table
        if re.search(r"main\.py --role (target|fused_target|draft_worker) .*--backend nxdi", command)
    }
)


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split()[2:8]))
def test_a_recipes_command_is_something_that_nxdi_can_do(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    args = main.parser().parse_args(shlex.split(line)[1:])
    config = model_config(args, args.model or args.target_model)
    kinds = {"fused_target": Kind.FUSED, "draft_worker": Kind.PLAIN}
    kind = kinds.get(args.role, Kind.WINDOW if config.shape.max_draft else Kind.PLAIN)
    build = plan_build(_request(kind, config.execution, config.shape), config.settings)
    assert build.max_length > 0 and build.neuron["tp_degree"] == args.tp_degree
    if kind is Kind.FUSED:
        assert build.max_length >= config.shape.max_length - build.layout.span


def test_there_are_recipes() -> None:
    assert len(LINES) >= 3

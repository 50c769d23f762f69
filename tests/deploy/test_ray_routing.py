"""Tandem on Ray Serve without a cluster: routing, settings, and the import name `proto`."""

from __future__ import annotations

import sys

import pytest

from tandem.workshops.ray_serve.application import main
from tandem.workshops.ray_serve.application import run as deploy


def test_only_server_roles_can_be_deployed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="role: client is not one of target, fused_target, draft_worker, prefill"):
        deploy(("--role", "client"))


def test_without_ray_there_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--", "--role", "target"]) == 2
    assert capsys.readouterr().err == "ray_serve: ray is not installed: make setup\n"

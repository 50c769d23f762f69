"""Campaigns run where asked for, what needs hardware where there is some; the rest everywhere, without a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("markexpr")
    if "campaign" not in asked and "marathon" not in asked:  # not by addopts: another -m would let campaigns in
        campaigns = [item for item in items if item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=campaigns)
        items[:] = [item for item in items if item not in campaigns]
    for item in items:
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("neuron") and not list(Path("/dev").glob("neuron*")):
            item.add_marker(pytest.mark.skip(reason="needs a Neuron device (/dev/neuron*)"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()

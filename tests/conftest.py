"""Markers that need hardware skip with a reason; everything else runs everywhere, without a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("neuron") and not list(Path("/dev").glob("neuron*")):
            item.add_marker(pytest.mark.skip(reason="needs a Neuron device (/dev/neuron*)"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()

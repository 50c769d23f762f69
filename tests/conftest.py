"""What takes minutes runs where asked for, what needs hardware where there is some; the rest everywhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tandem.runners.torch.platforms import CPU

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name, value in CPU.environment.items():  # as in a server's process: some tests run steps in their own
    os.environ.setdefault(name, value)

LONG = ("campaign", "images", "marathon", "thorough")


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts its background jobs with SIGINT ignored, nohup with SIGHUP, and children inherit that: processes
    that tests interrupt would obey, and go on for ever."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("markexpr")
    if not any(marker in asked for marker in LONG):  # not by addopts: another -m would let them in
        left_out = [item for item in items if any(item.get_closest_marker(marker) for marker in LONG)]
        config.hook.pytest_deselected(items=left_out)
        left = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in left]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # long files first: begun last, one keeps every worker waiting
    for item in items:
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("neuron") and not list(Path("/dev").glob("neuron*")):
            item.add_marker(pytest.mark.skip(reason="needs a Neuron device (/dev/neuron*)"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()

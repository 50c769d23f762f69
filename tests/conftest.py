"""What takes minutes runs where asked for, what needs hardware where there is some; the rest everywhere."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.runners.torch.platforms import CPU
from tests.daily import divide

# Containers set it: then every server that a test starts would compile 450 files first, half of its work.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Of two threads of a small step, one waits for the other, which waits for a core: spinning took most of the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name, value in CPU.environment.items():  # as in a server's process: some tests run steps in their own
    os.environ.setdefault(name, value)

LONG = {"campaign", "clients", "docs", "engines", "images", "thorough", "wide"}


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts its background jobs with SIGINT ignored, nohup with SIGHUP, and children inherit that: processes
    that tests interrupt would obey, and go on for ever."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs coroutine tests."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from tests.support import run

    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What importing all the modules makes is there to stay: no collection of garbage looks through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    divide(items)
    yield  # the marks that are asked for are all that is left
    asked = config.getoption("markexpr")
    if not any(marker in asked for marker in LONG):  # not by addopts: another -m would let them in
        left_out = [item for item in items if not LONG.isdisjoint(mark.name for mark in item.iter_markers())]
        config.hook.pytest_deselected(items=left_out)
        left = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in left]
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], _form(item)))
    for item in items:
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("neuron") and not list(Path("/dev").glob("neuron*")):
            item.add_marker(pytest.mark.skip(reason="needs a Neuron device (/dev/neuron*)"))


def _form(item: pytest.Item) -> str:
    """The format of the real model that a test loads: those of one run one after the other (tests/runners/real.py)."""
    parameters = (
        item.callspec.params if hasattr(item, "callspec") and hasattr(getattr(item, "module", 0), "real") else {}
    )
    return f"{parameters.get('dtype', parameters.get('form', ''))}, {parameters.get('compile', '')}"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch uses one thread: a second one would spin after each of thousands of tiny operations."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

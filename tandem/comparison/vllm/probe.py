"""Asks a Python which vLLM it has, before any server is started."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.comparison.vllm.commands import environment, installing
from tandem.comparison.vllm.settings import VARIABLE

SECONDS = 300.0
"""Importing vLLM may take a minute on a cold disk."""
_PROGRAM = """
import importlib, json, sys
import vllm
from vllm.platforms import current_platform
said = {"version": vllm.__version__, "device": current_platform.device_type, "drafter": ""}
try:
    importlib.import_module("tandem.vllm").RemoteDrafter
except ImportError as error:
    said["drafter"] = str(error)
sys.stdout.write("\\n" + json.dumps(said))
"""


class NoVllm(RuntimeError):
    """vLLM is not there, or lacks what our drafter needs; the message is one line with the command that installs it."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a Python has: vLLM's version, the device that it would serve on, and why our drafter cannot be imported."""

    python: str
    version: str
    device: str
    drafter: str = ""


def python_of(named: str | None) -> str:
    """Returns the Python that is named, by the flag or by the variable. Raises NoVllm."""
    python = named or os.environ.get(VARIABLE)
    if not python:
        raise NoVllm(_absent("none is named"))
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise NoVllm(_absent(f"{python} is no program"))
    return python


async def find(named: str | None, drafted: bool, program: Sequence[str] = ("-c", _PROGRAM)) -> Found:
    """Asks a Python which vLLM it has. `drafted`: it must be able to import our drafter too. Raises NoVllm."""
    python = python_of(named)
    process = await asyncio.create_subprocess_exec(
        python,
        *program,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    asked = asyncio.ensure_future(process.communicate())
    try:
        await asyncio.wait({asked}, timeout=SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
        said, errors = await asked
    if process.returncode:
        last = [line for line in errors.decode(errors="replace").splitlines() if line.strip()][-1:]
        raise NoVllm(_absent(f"{python}: {''.join(last) or f'ended with code {process.returncode}'}"))
    try:
        found = Found(python, **json.loads(said.splitlines()[-1]))
    except (ValueError, TypeError, IndexError) as error:
        raise NoVllm(_absent(f"{python} says something else: {error}")) from None
    if drafted and found.drafter:
        install = f"{python} -m pip install tandem-speculative"
        raise NoVllm(f"vllm-python: {python} cannot load tandem.vllm.RemoteDrafter ({found.drafter}): {install}")
    return found


def _absent(why: str) -> str:
    return (
        f"vllm-python: no vLLM ({why}): install it by `{installing(sys.executable)}` and name its Python, "
        f"--vllm-python .venv-vllm/bin/python or {VARIABLE}"
    )

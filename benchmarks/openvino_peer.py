"""Runs OpenVINO GenAI as a contender, in a worker process with its own environment, as vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("openvino_worker.py")
VARIABLE = "TANDEM_OPENVINO_PYTHON"
FILE_TYPES = {"BF16": "F16"}
"""What it runs in place of a format that it does not read; it computes in a format that it chooses itself."""


def absence(python: str | None) -> str | None:
    """Returns why OpenVINO is not available; None if it seems to be."""
    if not python:
        return f"no openvino: pip install openvino-genai in an environment, pass --openvino-python or set {VARIABLE}"
    return None if os.access(python, os.X_OK) else f"no openvino: {python} is no program"


def settings(model: Path, file_type: str, threads: int, sequences: int) -> dict[str, Any]:
    """Returns what the worker is asked first."""
    return {"model": str(model), "file_type": file_type, "threads": threads, "sequences": sequences}

"""Runs OpenVINO GenAI as a contender, in a worker process with its own environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("openvino_worker.py")
VARIABLE = "TANDEM_OPENVINO_PYTHON"
FILE_TYPES = {"BF16": "F16"}  # replaces a format that it does not read


def absence(python: str | None) -> str | None:
    """Returns why OpenVINO is not available, if so."""
    if not python:
        return f"no openvino: pip install openvino-genai in an environment, pass --openvino-python or set {VARIABLE}"
    return None if os.access(python, os.X_OK) else f"no openvino: {python} is no program"


def settings(model: Path, file_type: str, threads: int, sequences: int) -> dict[str, Any]:
    return {"model": str(model), "file_type": file_type, "threads": threads, "sequences": sequences}

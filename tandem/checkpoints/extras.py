"""Names the missing extra where torch or transformers are needed."""

from __future__ import annotations

import importlib.util

from tandem.checkpoints.locate import CheckpointError
from tandem.installing import install_command


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def need_torch(what: str, *also: str) -> None:
    """Raises CheckpointError without torch; `what`: the message's subject."""
    need(what, "torch", *also)


def need(what: str, *names: str) -> None:
    missing = [name for name in names if not is_installed(name)]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        raise CheckpointError(
            f"{what} needs {' and '.join(missing)}, which {verb} not installed: {install_command('torch')}"
        )

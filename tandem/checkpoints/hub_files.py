"""Finds a hub id's files, downloading uncached ones."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import Checkpoint, CheckpointError, first_line
from tandem.installing import install_command

CONNECT_SECONDS = 5
_JSON, _WEIGHTS, _PICKLES = "*.json", "model*.safetensors", "pytorch_model*.bin"


def configuration_folder(checkpoint: Checkpoint) -> Path:
    """Returns the folder of config.json. Raises CheckpointError."""
    folder = Path(checkpoint.folder)
    if folder.is_dir():
        return folder
    from huggingface_hub import hf_hub_download

    return _from_hub(hf_hub_download, checkpoint.folder, filename="config.json").parent


def read_configuration(checkpoint: Checkpoint) -> dict[str, Any]:
    return read_object(configuration_folder(checkpoint) / "config.json")


def weights_folder(checkpoint: Checkpoint) -> Path:
    folder = Path(checkpoint.folder)
    if folder.is_dir():
        return folder
    for weights in (_WEIGHTS, _PICKLES):
        folder = _snapshot(checkpoint.folder, _JSON, weights)
        if any(folder.glob(weights)):
            return folder
    raise CheckpointError(f"{checkpoint.folder}: cannot be loaded: it has neither {_WEIGHTS} nor {_PICKLES}")


def tokenizer_folder(checkpoint: Checkpoint) -> Path:
    folder = Path(checkpoint.folder)
    return folder if folder.is_dir() else _snapshot(checkpoint.folder, _JSON, "*.jinja", "*.model")


def _snapshot(name: str, *patterns: str) -> Path:
    from huggingface_hub import snapshot_download

    return _from_hub(snapshot_download, name, allow_patterns=list(patterns))


def _from_hub(download: Callable[..., str], name: str, **files: Any) -> Path:
    # The hub's client retries for a minute: without a connection it is asked for cached files alone.
    unreachable = _unreachable()
    try:
        return Path(download(name, local_files_only=bool(unreachable), **files))
    except Exception as error:  # of the hub, of the network, of the cache
        cached = f"neither a folder nor in the cache of hub models, and {unreachable}"
        raise CheckpointError(f"{name}: cannot be loaded: {cached if unreachable else first_line(error)}") from error


def _unreachable() -> str:
    """Why the hub cannot be connected to; "" if it can, or by a proxy perhaps."""
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if getproxies():
        return ""
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), CONNECT_SECONDS).close()
    except OSError as error:
        return f"{hub.hostname} cannot be reached ({error.strerror or error})"
    return ""


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def need(what: str, *names: str) -> None:
    """Raises CheckpointError without these packages; `what`: the message's subject."""
    missing = [name for name in names if not is_installed(name)]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        raise CheckpointError(
            f"{what} needs {' and '.join(missing)}, which {verb} not installed: {install_command('torch')}"
        )

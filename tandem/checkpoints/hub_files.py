"""Finds a hub id's files, downloading uncached ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import Checkpoint, CheckpointError, first_line
from tandem.installing import install_command

_JSON, _WEIGHTS, _PICKLES = "*.json", "model*.safetensors", "pytorch_model*.bin"


def configuration_folder(checkpoint: Checkpoint) -> Path:
    """Returns the folder of config.json. Raises CheckpointError."""
    folder = Path(checkpoint.folder)
    if folder.is_dir():
        return folder
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(checkpoint.folder, "config.json")).parent
    except Exception as error:  # of the hub, of the network, of the cache
        raise CheckpointError(f"{checkpoint.folder}: cannot be loaded: {first_line(error)}") from error


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

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # of the hub, of the network, of the cache
        raise CheckpointError(f"{name}: cannot be loaded: {first_line(error)}") from error


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

"""Reads a model's generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.checkpoints.family_configs import end_ids
from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import Checkpoint, CheckpointError
from tandem.speculation.sampling import SAMPLING_FIELDS, SamplingParams

GENERATION_CONFIG = "generation_config.json"
_SAMPLING = tuple(name for name in SAMPLING_FIELDS if name != "seed")  # a seed says nothing of a model


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the file's SamplingParams fields and `max_new_tokens`; a hub id's cached. Raises CheckpointError."""
    file = _file(checkpoint)
    if file is None:
        return {}
    try:
        fields = {name: value for name, value in read_object(file).items() if value is not None}
        found: dict[str, Any] = {
            name: _number(name, fields[name]) for name in (*_SAMPLING, "max_new_tokens") if name in fields
        }
        samples = fields.get("do_sample")
        if samples is not None and not isinstance(samples, bool):
            raise ValueError(f"do_sample: {str(samples)[:60]!r} is neither true nor false")
        if samples is not None:
            found["temperature"] = found.get("temperature", 1.0) if samples else 0.0
        SamplingParams(**{name: value for name, value in found.items() if name != "max_new_tokens"})
        if found.get("max_new_tokens", 1) < 1:
            raise ValueError(f"max_new_tokens: {found['max_new_tokens']} is below 1")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}; --generation_config none leaves the file's values out") from None
    return found


def all_end_ids(checkpoint: Checkpoint, usual: tuple[int, ...]) -> tuple[int, ...]:
    files = (_file(checkpoint, name) for name in (GENERATION_CONFIG, "config.json"))
    ids = [token for file in files if file for token in end_ids(read_object(file).get("eos_token_id"))]
    return tuple(dict.fromkeys(ids)) or usual


def _file(checkpoint: Checkpoint, name: str = GENERATION_CONFIG) -> Path | None:
    if checkpoint.gguf:
        return None
    folder = Path(checkpoint.folder)
    if folder.is_dir():
        file = folder / name
        return file if file.exists() else None
    if checkpoint.folder.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(checkpoint.folder, name)
    return Path(found) if isinstance(found, str) else None


def _number(name: str, value: object) -> int | float:
    whole = name in ("top_k", "max_new_tokens")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ValueError(f"{name}: {str(value)[:60]!r} is not a {'whole ' if whole else ''}number")
    return value if whole else float(value)

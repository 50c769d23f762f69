"""Reads a checkpoint's facts without a model library."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import Checkpoint, CheckpointError

# Text models of NxDI 0.9 (utils/constants.py MODEL_TYPES) that keep every position; gemma3 and gpt_oss roll caches.
FAMILIES = ("dbrx", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`digest`: of config.json. `end_ids`: token ids that end a sequence."""

    folder: str
    model_type: str
    vocab_size: int
    dtype: str
    end_ids: tuple[int, ...]
    digest: str


HUB_FILES = ["*.json", "*.safetensors", "*.model", "tokenizer*", "merges.txt", "vocab*"]


def local(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as a local folder. Raises CheckpointError if a hub id cannot be had."""
    if checkpoint.gguf is not None or Path(checkpoint.folder).is_dir():
        return checkpoint
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(checkpoint.folder, allow_patterns=HUB_FILES)
    except Exception as error:  # of the network, of the hub, or of its cache
        why = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{checkpoint.folder}: neither a folder nor to be had from the hub: {why}") from None
    return replace(checkpoint, folder=folder)


def facts(checkpoint: Checkpoint, max_length: int) -> ModelFacts:
    """Raises CheckpointError or ValueError if NxDI cannot run the model for `max_length` tokens."""
    folder = Path(checkpoint.folder)
    if checkpoint.gguf is not None:
        raise CheckpointError(f"{folder / checkpoint.gguf}: nxdi reads Hugging Face folders (safetensors), not GGUF")
    config = _fields(folder / "config.json")
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise CheckpointError(f"{folder}: NxD Inference has no text model {kind!r}; it has {', '.join(FAMILIES)}")
    inner = text_config(folder)
    _check_length(inner, max_length)
    dtype = inner.get("dtype") or inner.get("torch_dtype") or "bfloat16"
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    return ModelFacts(str(folder), kind, inner["vocab_size"], str(dtype), _end_ids(folder, inner), digest)


def text_config(folder: Path) -> dict[str, Any]:
    """A folder's text model configuration, with vocab_size. Raises CheckpointError."""
    file = folder / "config.json"
    config = _fields(file)
    inner = config.get("text_config") or config
    if not isinstance(inner, dict) or type(inner.get("vocab_size")) is not int:
        raise CheckpointError(f"{file}: has no vocab_size that is a number")
    return inner


def _fields(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from None


def older_rope(folder: str) -> dict[str, Any]:
    """transformers 4.57's fields for a rotary embedding that transformers 5 wrote into config.json; or {}.

    4.57 silently ignores `rope_parameters` and uses base 10000. Raises CheckpointError if layers have several kinds.
    """
    file = Path(folder) / "config.json"
    config = _fields(file)
    written = config.get("rope_parameters")
    if not written or "rope_theta" in config:
        return {}
    if "rope_theta" not in written:
        raise CheckpointError(f"{file}: rope_parameters have no rope_theta, and NxD Inference reads one for all layers")
    fields = {"rope_theta": written["rope_theta"]}
    scaling = {name: value for name, value in written.items() if name != "rope_theta"}
    return fields if scaling.get("rope_type", "default") == "default" else fields | {"rope_scaling": scaling}


def _check_length(config: dict[str, Any], max_length: int) -> None:
    positions = config.get("max_position_embeddings")
    if positions and max_length > positions:
        raise ValueError(f"sequence_length: {max_length} is above the model's {positions} positions")
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and window < max_length:
        raise ValueError(
            f"sequence_length: {max_length} is above the model's sliding window of {window}: NxDI keeps such a cache "
            "rolled up, and a rejected draft could not be taken back"
        )


def _end_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    generation = _fields(file) if file.is_file() else {}
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    return () if ends is None else tuple(ends) if isinstance(ends, list) else (int(ends),)

"""Writes llama.cpp's GGUF files: the embedded target in other formats, and the embedded draft."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.formats import STORED
from benchmarks.peers import PeerFailed

FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}  # format to its number in general.file_type
_ROTARY = ("self_attn.q_proj", "self_attn.k_proj")


def read(file: Path) -> Any:
    """Opens a GGUF file with the library's reader; takes seconds for a vocabulary."""
    import gguf

    return gguf.GGUFReader(file)


def write_target(source: Any, file_type: str, file: Path) -> None:
    """Writes the model with matrices in `file_type`: dequantised to float32 as in Tandem, then rounded once.

    With 4 bits, the matrices that the source has in 4.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[file_type]
    writer = _writer(file, source, ("",), file_type)
    for tensor in source.tensors:
        wider = file_type.startswith("Q4") and tensor.tensor_type.name != STORED
        if len(tensor.shape) < 2 or tensor.tensor_type == kind or wider:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            dense = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quantize(dense, kind), raw_dtype=kind)
    _finish(writer)


def write_mixed(program: Path, source: Path, file_type: str, file: Path, threads: int) -> None:
    """Has llama.cpp's own program write a format that `gguf` cannot. Raises PeerFailed."""
    command = [str(program), str(source), str(file), file_type, str(threads)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise PeerFailed(f"no {file_type}: {program}: {error.strerror}") from None
    if done.returncode:
        said = done.stdout.strip().splitlines() or [""]
        raise PeerFailed(f"no {file_type}: {program.name} ended with code {done.returncode}: {said[-1]}")


def write_draft(folder: Path, target: Any, file_type: str, file: Path) -> None:
    """Writes a Llama checkpoint with the target's tokenizer. Raises ValueError for another model type."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    _check(folder, config)
    known_tokens = len(target.fields["tokenizer.ggml.tokens"].data)
    if known_tokens != config["vocab_size"]:
        raise ValueError(f"{folder}: {config['vocab_size']} tokens, and the target has {known_tokens}")
    writer = _writer(file, target, ("tokenizer.",), file_type)
    _add_shape(writer, config)
    kind = gguf.GGMLQuantizationType[file_type]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weights in load_file(folder / "model.safetensors").items():
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ValueError(f"{folder}: {name} has no name in GGUF")
        dense = weights.astype(np.float32)
        if any(part in name for part in _ROTARY):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            dense = interleaved(dense, heads)
        if dense.ndim < 2:
            writer.add_tensor(known, dense)
        else:
            writer.add_tensor(known, gguf.quantize(dense, kind), raw_dtype=kind)
    _finish(writer)


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Returns rows [heads × head_dim, ...] of q or k with rotary pairs side by side, as in GGUF."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _check(folder: Path, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {"rope_type": "default"}
    if config["model_type"] != "llama" or rope["rope_type"] != "default" or config.get("mlp_bias"):
        raise ValueError(f"{folder}: only a Llama without scaled rotary positions and biases of the MLP is converted")


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _writer(file: Path, reader: Any, prefixes: Iterable[str], file_type: str) -> Any:
    """Begins a file with the reader's values under these prefixes."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    left_out = ("GGUF.", "general.architecture", "general.file_type")  # what the writer gives itself
    for name, field in reader.fields.items():
        if name.startswith(tuple(prefixes)) and not name.startswith(left_out):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(FILE_TYPES[file_type])
    return writer


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

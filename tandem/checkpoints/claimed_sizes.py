"""Checks a checkpoint's claimed sizes against its files before allocating."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.checkpoints.gguf_header import Header, MalformedHeader
from tandem.checkpoints.json_files import read_object

BITS = 8  # parameters per byte of weights at most: no format uses less than a bit
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")

# Names of sizes in a config.json and in a GGUF's metadata.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "block_count")
_WIDTH = ("hidden_size", "n_embd", "d_model", "embedding_length")
_PER_LAYER = (
    *("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "feed_forward_length"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("expert_count", "expert_feed_forward_length"),
)
_ROWS = ("vocab_size", "tokens")


class ImplausibleSize(ValueError):
    """A claimed size does not fit the files; the message has both."""


def check_folder(folder: Path, weights: list[Path]) -> None:
    """Checks config.json against the weight files. Raises ImplausibleSize, OSError or ValueError."""
    _check(read_object(folder / "config.json"), BITS * sum(file.stat().st_size for file in weights))


def check_gguf(files: Sequence[Path]) -> None:
    """Checks metadata against tensor tables, and those against the files. Raises ImplausibleSize."""
    headers = []
    for file in files:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                headers.append(Header(content))
            except MalformedHeader as error:
                raise ImplausibleSize(str(error)) from None
    _check_headers(headers, sum(file.stat().st_size for file in files))


def _check_headers(headers: Sequence[Header], size: int) -> None:
    claims = {key.partition(".")[2]: value for key, value in headers[0].values.items()}
    tensors = [tensor for header in headers for tensor in header.tensors.values()]
    elements = sum(tensor.elements for tensor in tensors)
    blocks = {int(found[1]) for tensor in tensors if (found := _BLOCK.match(tensor.name))}
    if elements > BITS * size:
        raise ImplausibleSize(f"its tensors have {elements} elements, more than {size} bytes can hold")
    layers = claims.get("block_count")
    if isinstance(layers, int) and layers > len(blocks):
        raise ImplausibleSize(f"block_count: {layers} layers, and there are tensors of {len(blocks)}")
    _check({**claims, "tokens": claims.get("ggml.tokens")}, elements)


def _check(claims: Mapping[str, Any], elements: int) -> None:
    layers, width = _largest(claims, _LAYERS)[1], _largest(claims, _WIDTH)[1]
    if layers * width > elements:
        raise ImplausibleSize(f"{layers} layers of width {width}, and the weights have at most {elements} parameters")
    for names, times in ((_PER_LAYER, max(1, layers) * max(1, width)), (_ROWS, max(1, width))):
        name, size = _largest(claims, names)
        if size * times > elements:
            raise ImplausibleSize(
                f"{name}: {size} beside {layers} layers of width {width}, "
                f"and the weights have at most {elements} parameters"
            )


def _largest(claims: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int]:
    sizes = ((value, name) for name in names if type(value := claims.get(name)) is int)
    size, name = max(sizes, default=(0, names[0]))
    return name, size

"""Writes GGUF files of any keys and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf


def write_gguf(file: Path, architecture: str, values: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """`values`: of Python's types, or (value, GGUFValueType). `tensors`: arrays, or (blocks, GGMLQuantizationType)."""
    writer = gguf.GGUFWriter(file, architecture)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in values.items():
        if isinstance(value, tuple):
            writer.add_key_value(name, *value)
        else:
            (writer.add_array if isinstance(value, list) else add[type(value)])(name, value)
    for name, data in tensors.items():
        made, kind = data if isinstance(data, tuple) else (data, None)
        writer.add_tensor(name, made, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file

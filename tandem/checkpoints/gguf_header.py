"""Reads GGUF headers in milliseconds, where gguf takes 3 s."""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MIN_OF_TENSOR = 8 + 4 + 4 + 8  # bytes of an entry without name and dimensions
_MOST_ENTRIES = 1 << 16  # values, and tensors
_MOST_NAME, _MOST_TEXT = 1 << 16, 1 << 20  # bytes; GGUF's own limit of keys, and more than any chat template
_MOST_HEADER = 1 << 28  # bytes, which are kept
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32
_MOST_LISTED = 1 << 12  # numbers of a list that is read whole without being wanted
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")


class MalformedHeader(ValueError):
    """The file has no valid GGUF header."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`dimensions`: inputs first. `kind`: GGML's number. `offset`: from the first tensor."""

    name: str
    dimensions: tuple[int, ...]
    kind: int
    offset: int


class Header:
    """`values`: numbers, strings; of arrays, the length or a larger maximum. `lists`: short arrays of numbers."""

    def __init__(self, content: mmap.mmap) -> None:
        """Raises MalformedHeader."""
        self.lists, self._arrays = dict[str, list[Any]](), dict[str, int]()
        with _malformed():
            reader = _Reader(content)
            if reader.read("4s") != b"GGUF" or reader.read("I") not in (2, 3):
                raise MalformedHeader("not a GGUF file of version 2 or 3")
            tensors, values = reader.read("Q"), reader.read("Q")
            if max(tensors, values) > _MOST_ENTRIES or tensors * _MIN_OF_TENSOR + values > len(content):
                raise MalformedHeader(f"{tensors} tensors and {values} values are claimed in {len(content)} bytes")
            self.values = dict(self._entry(reader) for _ in range(values))
            self.tensors = {tensor.name: tensor for tensor in (_tensor(reader) for _ in range(tensors))}
        if reader.at > _MOST_HEADER:
            raise MalformedHeader(f"{reader.at} bytes before the tensors, and {_MOST_HEADER} are the most")
        self.content = content[: reader.at]
        if len(self.values) < values or len(self.tensors) < tensors:
            raise MalformedHeader("a name stands twice in its header")

    @property
    def begin(self) -> int:
        """Returns the first tensor's byte."""
        alignment = self.whole("general.alignment", _ALIGNMENT)
        return -(-len(self.content) // alignment) * alignment

    def check_part(self, number: int, count: int) -> None:
        """Raises MalformedHeader unless it is this part of a split file, and says where tensors begin."""
        self.whole("general.alignment", _ALIGNMENT)
        stated = (self.values.get("split.no") or 0, self.values.get("split.count") or 1)
        if stated != (number, count):
            raise MalformedHeader(
                f"split.no {stated[0]} and split.count {stated[1]}, and by its name it is part {number} of {count}"
            )

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or value < 1:
            raise MalformedHeader(f"{name}: {value!r:.60} is not a whole number above 0")
        return value

    def array(self, name: str) -> list[Any] | None:
        """Returns an array's values; None where the file has none. Raises MalformedHeader."""
        if name not in self._arrays:
            return None
        with _malformed():
            reader = _Reader(self.content, self._arrays[name])
            kind, count = reader.read("I"), reader.read("Q")
            return reader.texts(count) if kind == _STRING else reader.numbers(_scalar(kind), count)

    def _entry(self, reader: _Reader) -> tuple[str, Any]:
        name, kind = reader.text(_MOST_NAME), reader.read("I")
        if kind == _ARRAY:
            return name, self._measured(name, reader)
        return name, reader.text(_MOST_TEXT) if kind == _STRING else reader.read(_scalar(kind))

    def _measured(self, name: str, reader: _Reader) -> int:
        self._arrays[name] = reader.at
        kind, count = reader.read("I"), reader.read("Q")
        if kind == _STRING:
            reader.skip_texts(count)
            return int(count)
        scalar, begins = _scalar(kind), reader.at
        if 0 < count <= _MOST_LISTED:
            self.lists[name] = reader.numbers(scalar, count)
        else:
            reader.skip(count * struct.calcsize(f"<{scalar}"))
        if scalar in "fd?" or not count:
            return int(count)
        import numpy as np

        return max(count, int(np.frombuffer(reader.content, f"<{scalar}", count, begins).max()))


@dataclass(slots=True)
class _Reader:
    """Reads at a byte. Raises struct.error beyond the end."""

    content: mmap.mmap | bytes
    at: int = 0

    def read(self, kind: str) -> Any:
        found = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return found[0]

    def text(self, most: int) -> str:
        length = self.read("Q")
        if length > most:
            raise MalformedHeader(f"a text of {length} bytes")
        self.skip(length)
        return self.content[self.at - length : self.at].decode()

    # a vocabulary and its merges are 100,000 texts: neither of these calls a function of ours for each
    def texts(self, count: int) -> list[str]:
        at, content, length, found = self.at, self.content, _LENGTH.unpack_from, list[bytes]()
        for _ in range(count):
            if (size := length(content, at)[0]) > _MOST_TEXT:
                raise MalformedHeader(f"a text of {size} bytes")
            at += 8 + size
            found.append(content[at - size : at])
        self.skip(at - self.at)
        return [each.decode() for each in found]

    def numbers(self, scalar: str, count: int) -> list[Any]:
        size = count * struct.calcsize(f"<{scalar}")
        self.skip(size)
        return list(struct.unpack_from(f"<{count}{scalar}", self.content, self.at - size))

    def skip_texts(self, count: int) -> None:
        at, content, length = self.at, self.content, _LENGTH.unpack_from
        for _ in range(count):
            at += 8 + length(content, at)[0]
        self.skip(at - self.at)

    def skip(self, count: int) -> None:
        if count > len(self.content) - self.at:
            raise struct.error("beyond the end")
        self.at += count


def header_of(file: Path) -> Header:
    """Returns a file's header, read once. Raises OSError, MalformedHeader."""
    state = file.stat()
    found = (file, state.st_ino, state.st_size, state.st_mtime_ns)
    header = _read_once(*found)
    with file.open("rb") as stream:
        if stream.read(len(header.content)) != header.content:  # changed within a tick of the file system's clock
            _read_once.cache_clear()
    return _read_once(*found)


@functools.lru_cache(maxsize=64)
def _read_once(file: Path, *_state: int) -> Header:
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return Header(content)


def _tensor(reader: _Reader) -> TensorEntry:
    name, count = reader.text(_MOST_NAME), reader.read("I")
    if not 1 <= count <= _MAX_DIMENSIONS:
        raise MalformedHeader(f"{name[:60]!r}: {count} dimensions")
    dimensions = tuple(reader.read("Q") for _ in range(count))
    if not all(dimensions):
        raise MalformedHeader(f"{name[:60]!r}: has no elements")
    return TensorEntry(name, dimensions, reader.read("I"), reader.read("Q"))


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise MalformedHeader(f"a value of the unknown type {kind}")
    return _SCALARS[kind]


@contextmanager
def _malformed() -> Iterator[None]:
    try:
        yield
    except (struct.error, OverflowError, UnicodeDecodeError):
        raise MalformedHeader("its header extends beyond its end, or is no UTF-8") from None

"""Parses untrusted JSON fields; errors name the field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tandem.speculation.errors import InvalidField

Json = dict[str, Any]
_SURROGATE = re.compile("[\ud800-\udfff]")
MOST = 2**26  # of an integer
LONGEST, LONGEST_NAME = 2**16, 512  # characters


class Reader:
    """Fields of a JSON object, called `name` in errors."""

    def __init__(self, name: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise InvalidField(name, "not a JSON object")
        self._data: Mapping[str, Any] = data

    def only(self, *names: str) -> None:
        """Rejects fields besides `names`: unknown ones would go unchecked."""
        for name in self._data:
            if name not in names:
                raise InvalidField(name[:64], "not a field of a receipt of this version")

    def value(self, name: str) -> Any:
        if name not in self._data:
            raise InvalidField(name, "missing")
        return self._data[name]

    def inner(self, name: str) -> Reader:
        return Reader(name, self.value(name))

    def each(self, name: str) -> Iterator[Reader]:
        return (Reader(name, each) for each in self._list(name))

    def absent(self, name: str) -> tuple[()]:
        if self.value(name) is not None:
            raise InvalidField(name, "there, but was not asked for")
        return ()

    def text(self, name: str) -> str:
        return self._checked(name, self.value(name), _text, f"a text of at most {LONGEST} characters")

    def name(self, name: str) -> str:
        """Returns printable text: escape sequences could hide findings."""
        return self._checked(name, self.value(name), _name, f"at most {LONGEST_NAME} printable characters")

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._checked(name, each, _text, "a list of texts") for each in self._list(name))

    def one_of(self, name: str, choices: Collection[str]) -> str:
        if (found := self.text(name)) not in choices:
            raise InvalidField(name, f"{found[:64]!r} is not one of {', '.join(choices)}")
        return found

    def boolean(self, name: str) -> bool:
        return self._checked(name, self.value(name), lambda value: isinstance(value, bool), "true or false")

    def integer(self, name: str, least: int = 0, most: int = MOST) -> int:
        fits = _integer(least, most + 1)
        return self._checked(name, self.value(name), fits, f"an integer from {least} to {most}")

    def integers(self, name: str, below: int = MOST) -> tuple[int, ...]:
        fits = _integer(0, below)
        return tuple(self._checked(name, each, fits, f"a list of integers below {below}") for each in self._list(name))

    def real(self, name: str) -> float:
        return float(self._checked(name, self.value(name), _real, "a finite number"))

    def pairs(self, name: str, below: int = MOST) -> tuple[tuple[int, float], ...]:
        fits = _integer(0, below)

        def paired(value: Any) -> bool:
            return isinstance(value, list) and len(value) == 2 and fits(value[0]) and _real(value[1])

        found = [self._checked(name, each, paired, "a list of pairs of id and number") for each in self._list(name)]
        return tuple((token, float(number)) for token, number in found)

    def counts(self, name: str) -> Mapping[str, int]:
        inner = self.inner(name)
        return {self._checked(name, key, _name, "an object of short names"): inner.integer(key) for key in inner._data}

    def hex(self, name: str, count: int) -> bytes:
        return _bytes(self._checked(name, self.value(name), _hex(count), f"{count} bytes in hexadecimal"))

    def hexes(self, name: str, count: int) -> tuple[bytes, ...]:
        fits, what = _hex(count), f"a list of {count} bytes in hexadecimal"
        return tuple(_bytes(self._checked(name, each, fits, what)) for each in self._list(name))

    def _list(self, name: str) -> list[Any]:
        found: list[Any] = self._checked(name, self.value(name), lambda value: isinstance(value, list), "a list")
        return found

    def _checked(self, name: str, value: Any, fits: Callable[[Any], bool], what: str) -> Any:
        if not fits(value):
            raise InvalidField(name, f"not {what}")
        return value


def _text(value: Any) -> bool:
    # "\ud800" alone is no character.
    return isinstance(value, str) and len(value) <= LONGEST and not _SURROGATE.search(value)


def _name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()


def _real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63 and math.isfinite(value)


def _integer(least: int, end: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < end


def _hex(count: int) -> Callable[[Any], bool]:
    digits = set("0123456789abcdef")
    return lambda value: isinstance(value, str) and len(value) == 2 * count and set(value) <= digits


def _bytes(value: str) -> bytes:
    return bytes.fromhex(value)

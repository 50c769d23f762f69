"""Checks values of a request's JSON: each function takes a field's name and value, and raises InvalidField."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tandem.speculation.types import InvalidField

Parse = Callable[[str, Any], Any]
_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}


def refused(name: str, value: Any, wanted: str) -> InvalidField:
    """Builds the error for a value of the wrong type."""
    return InvalidField(name, f"{_NAMES.get(type(value), 'null')} where {wanted} is expected")


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refused(name, value, "a boolean")
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(name, value, "a string")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(name, value, "an object")
    return value


def sequence(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise refused(name, value, "a list")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(name, value, "a number")
    try:
        if math.isfinite(as_float := float(value)):
            return as_float
    except OverflowError:
        pass
    raise InvalidField(name, "the number is not finite")


def integer(least: int, most: int) -> Parse:
    def parse(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 64.0, as clients of languages with one kind of number write it
        if isinstance(value, bool) or not isinstance(value, int):
            raise refused(name, value, "an integer")
        if not least <= value <= most:
            raise InvalidField(name, f"{value} is outside {least} to {most}")
        return value

    return parse


def unless(absent: int, parse: Parse) -> Parse:
    """Takes a value for null."""
    return lambda name, value: None if value == absent and value is not True else parse(name, value)


def one_of(*values: str) -> Parse:
    def parse(name: str, value: Any) -> str:
        if string(name, value) not in values:
            raise InvalidField(name, f"{value!r} is not one of {', '.join(values)}")
        return str(value)

    return parse


def listed(each: Parse) -> Parse:
    def parse(name: str, value: Any) -> list[Any]:
        return [each(f"{name}[{i}]", one) for i, one in enumerate(sequence(name, value))]

    return parse


def known(name: str, value: Any, keys: Mapping[str, Parse]) -> dict[str, Any]:
    """Parses an object that has these keys alone. Null stands for what is absent."""
    found = {}
    for key, one in mapping(name, value).items():
        if one is None:
            continue
        if key not in keys:
            raise InvalidField(f"{name}.{key[:64]}", f"not a field that is served here: {', '.join(keys)}")
        found[key] = keys[key](f"{name}.{key}", one)
    return found


def as_happens(*values: Any, why: str) -> Parse:
    """Accepts the values that ask for what happens anyway, and no other."""

    def parse(name: str, value: Any) -> Any:
        if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in values):
            raise InvalidField(name, why)
        return value

    return parse


def never(why: str) -> Parse:
    def parse(name: str, value: Any) -> Any:
        raise InvalidField(name, why)

    return parse

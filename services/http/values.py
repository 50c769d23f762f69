"""Parses untrusted JSON: each parser takes a field's name and value and raises InvalidField."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tandem.speculation.chat import MOST_DEPTH, deeper_than
from tandem.speculation.types import InvalidField

Parse = Callable[[str, Any], Any]
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")
_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}


def read_json(data: bytes) -> dict[str, Any]:
    """Returns a JSON object. Raises InvalidField, also for JSON on which parsers disagree."""
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once, parse_constant=_finite)
        if _SURROGATES.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except InvalidField:
        raise
    except UnicodeError:
        raise InvalidField("body", "not UTF-8") from None
    except RecursionError:
        raise InvalidField("body", f"nested deeper than {MOST_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidField("body", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidField("body", "not a JSON object")
    if deeper_than(value, MOST_DEPTH):
        raise InvalidField("body", f"nested deeper than {MOST_DEPTH} levels")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise InvalidField(next(name for name in names if names.count(name) > 1), "given twice")
    return found


def _finite(name: str) -> Any:
    raise InvalidField("body", f"{name} is not JSON")


def refused(name: str, value: Any, wanted: str) -> InvalidField:
    return InvalidField(name, f"{_NAMES.get(type(value), 'null')} where {wanted} is expected")


def _typed(kind: type) -> Parse:
    def parse(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise refused(name, value, _NAMES[kind])
        return value

    return parse


boolean, string, mapping, sequence = _typed(bool), _typed(str), _typed(dict), _typed(list)


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(name, value, "a number")
    if abs(value) <= sys.float_info.max:
        return float(value)
    raise InvalidField(name, "the number is not finite")


def integer(least: int, most: int, absent: int | None = None) -> Parse:
    def parse(name: str, value: Any) -> int | None:
        if isinstance(value, float) and value.is_integer():  # of clients without integers
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise refused(name, value, "an integer")
        if value == absent:
            return None
        if not least <= value <= most:
            raise InvalidField(name, f"{value} is outside {least} to {most}")
        return value

    return parse


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


def known(name: str, value: Any, keys: Mapping[str, Parse], needed: str = "") -> dict[str, Any]:
    """Parses an object with only these keys and the `needed` one; null is absent."""
    found = {}
    for key, one in mapping(name, value).items():
        if one is None:
            continue
        if key not in keys:
            raise InvalidField(f"{name}.{key[:64]}", f"not a field that is served here: {', '.join(keys)}")
        found[key] = keys[key](f"{name}.{key}", one)
    if needed and found.get(needed) in (None, ""):
        raise InvalidField(f"{name}.{needed}", "missing")
    return found


def only(*values: Any) -> Parse:
    """Accepts only these values."""

    def parse(name: str, value: Any) -> Any:
        if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in values):
            raise InvalidField(name, f"only {', '.join(map(json.dumps, values))} is served")
        return value

    return parse

"""Reads JSON that anybody may send."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

from tandem.services.http.errors import BodyTooLarge
from tandem.speculation.chat import MOST_DEPTH, deeper_than
from tandem.speculation.types import InvalidField

_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")


def unpacked(data: bytes, most: int) -> bytes:
    """Unpacks gzip, never more than `most` bytes. Raises InvalidField and BodyTooLarge."""
    reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        found = reader.decompress(data, most + 1)
    except zlib.error:
        raise InvalidField("body", "not gzip, as its content-encoding says") from None
    if len(found) > most:
        raise BodyTooLarge(most)
    if not reader.eof or reader.unused_data:
        raise InvalidField("body", "not one whole gzip member, as its content-encoding says")
    return found


def read_json(data: bytes) -> dict[str, Any]:
    """Returns a body's object. Raises InvalidField for other JSON, and for JSON that readers take differently."""
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

"""Checks JSON values against receipt.schema.json; errors name the field."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from tandem.speculation.errors import InvalidField

Json = dict[str, Any]
_SURROGATE = re.compile("[\ud800-\udfff]")
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def check_document(document: Any) -> None:
    """Raises InvalidField, also for unknown fields: they would go unchecked."""
    schema = json.loads((Path(__file__).parent / "receipt.schema.json").read_text(encoding="utf-8"))
    check("receipt", document, schema)


def check(name: str, value: Any, schema: Json) -> None:
    """Raises InvalidField. Of JSON Schema only what receipt.schema.json has."""
    if "anyOf" in schema:
        something, _null = schema["anyOf"]
        return None if value is None else check(name, value, something)
    if known := schema.get("enum") or [schema[each] for each in ("const",) if each in schema]:
        if type(value) not in (str, int) or value not in known:
            raise InvalidField(name, f"not one of {', '.join(map(str, known))}")
        return None
    kind = schema["type"]
    if type(value) not in _TYPES[kind]:
        raise InvalidField(name, f"not of type {kind}")
    if kind == "object":
        _check_object(name, value, schema)
    elif kind == "array":
        _check_size(name, len(value), schema, "Items", "entries")
        pairs = schema.get("prefixItems")
        for i, each in enumerate(value):
            check(name, each, pairs[i] if pairs else schema["items"])
    elif kind == "string":
        _check_text(name, value, schema)
    elif kind != "boolean":
        least, most = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63)
        if not (math.isfinite(value) and least <= value <= most):
            raise InvalidField(name, f"outside {least} to {most}")
    return None


def _check_object(name: str, value: Json, schema: Json) -> None:
    known, others = schema.get("properties", {}), schema["additionalProperties"]
    for each in schema.get("required", ()):
        if each not in value:
            raise InvalidField(each, "missing")
    for each, inner in value.items():
        if others:
            _check_text(name, each, schema["propertyNames"])
        elif each not in known:
            raise InvalidField(each[:64], "not a field of a receipt of this version")
        check(each, inner, known.get(each, others))


def _check_text(name: str, value: str, schema: Json) -> None:
    _check_size(name, len(value), schema, "Length", "characters")
    if "pattern" in schema and not re.fullmatch(schema["pattern"].strip("^$"), value, re.ASCII):
        raise InvalidField(name, f"not of the form {schema['pattern']}")
    if _SURROGATE.search(value):
        raise InvalidField(name, "has a lone surrogate, which is no character")
    if schema.get("format") == "printable" and not value.isprintable():  # escape sequences could hide findings
        raise InvalidField(name, "has characters that are not printable")


def _check_size(name: str, count: int, schema: Json, what: str, unit: str) -> None:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", math.inf)
    if not least <= count <= most:
        raise InvalidField(name, f"{count} {unit} are outside {least} to {most}")

"""Reads the structure of an output: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

import json
from typing import Any

from tandem.services.http.values import Parse, boolean, known, listed, mapping, one_of, only, string
from tandem.speculation.types import InvalidField, Structure, StructureKind

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def json_schema(name: str, schema: Any) -> Structure:
    """Parses a schema, as an object or as its text."""
    text = schema if isinstance(schema, str) else json.dumps(mapping(name, schema), ensure_ascii=False)
    return made(name, StructureKind.JSON_SCHEMA, text)


def made(name: str, kind: StructureKind, text: str) -> Structure:
    """Builds a structure. Raises InvalidField with the name of the field."""
    try:
        return Structure(kind, text)
    except InvalidField as error:
        raise InvalidField(name, error.fault) from None


def response_format(name: str, value: Any) -> Structure | None:
    """Parses OpenAI's field; None for any text."""
    kind = one_of("text", "json_object", "json_schema")(f"{name}.type", mapping(name, value).get("type"))
    if kind == "json_schema":
        inner = known(name, value, {"type": string, "json_schema": mapping}).get("json_schema", {})
        keys = {"name": string, "description": string, "strict": boolean, "schema": mapping}
        return json_schema(f"{name}.json_schema.schema", known(f"{name}.json_schema", inner, keys).get("schema"))
    known(name, value, {"type": string})
    return json_schema(name, ANY_OBJECT) if kind == "json_object" else None


def _text(kind: StructureKind) -> Parse:
    return lambda name, value: made(name, kind, string(name, value))


def _choice(name: str, value: Any) -> Structure:
    return made(name, StructureKind.CHOICE, json.dumps(listed(string)(name, value), ensure_ascii=False))


_KINDS: dict[str, Parse] = {
    "json": json_schema,
    "regex": _text(StructureKind.REGEX),
    "choice": _choice,
    "grammar": _text(StructureKind.GRAMMAR),
    "json_object": lambda name, value: json_schema(name, ANY_OBJECT) if boolean(name, value) else None,
    "disable_any_whitespace": only("JSON has no whitespace here; a schema may ask for it", True),
}


def structured_outputs(name: str, value: Any) -> Structure | None:
    """Parses vLLM's object of one structure."""
    found = known(name, value, _KINDS)
    structures = [each for each in found.values() if isinstance(each, Structure)]
    if len(structures) > 1:
        raise InvalidField(name, f"an output has one structure, and there are {', '.join(found)}")
    return structures[0] if structures else None

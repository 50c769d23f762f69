"""Parses response_format, structured_outputs, tools and tool_choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.structure_schemas import CALLS, arguments_of, call_schema, definitions
from tandem.services.http.chat_messages import annotated
from tandem.services.http.tool_calls import FORMATS, Format, MarkedCalls, NamedCall, Parser, RequiredCalls
from tandem.services.http.values import Parse, boolean, known, listed, mapping, one_of, only, sequence, string
from tandem.speculation.types import InvalidField, Structure, StructureKind

ANY_OBJECT: dict[str, Any] = {"type": "object"}
MAX_TOOLS = 128
_SPACED = {"x-guidance": {"whitespace_pattern": " ?", "lenient": True}}
"""llguidance options: at most one space, as models write; unknown keywords ignored."""


def json_schema(name: str, schema: Any) -> Structure:
    text = schema if isinstance(schema, str) else json.dumps(mapping(name, schema), ensure_ascii=False)
    return made(name, StructureKind.JSON_SCHEMA, text)


def made(name: str, kind: StructureKind, text: str) -> Structure:
    try:
        return Structure(kind, text)
    except InvalidField as error:
        raise InvalidField(name, error.fault) from None


def response_format(name: str, value: Any) -> Structure | None:
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
    "disable_any_whitespace": only(True),
}


def structured_outputs(name: str, value: Any) -> Structure | None:
    found = known(name, value, _KINDS)
    structures = [each for each in found.values() if isinstance(each, Structure)]
    if len(structures) > 1:
        raise InvalidField(name, f"an output has one structure, and there are {', '.join(found)}")
    return structures[0] if structures else None


def tools(name: str, value: Any) -> list[dict[str, Any]]:
    if len(sequence(name, value)) > MAX_TOOLS:
        raise InvalidField(name, f"{len(value)} tools are above the limit of {MAX_TOOLS}")
    found = listed(_tool)(name, value)
    if len({each["function"]["name"] for each in found}) < len(found):
        raise InvalidField(name, "two functions have one name")
    return found


def _tool(name: str, value: Any) -> dict[str, Any]:
    found = annotated(name, value, {"type": one_of("function"), "function": mapping})
    keys: dict[str, Parse] = {"name": string, "description": string, "parameters": mapping, "strict": boolean}
    return {"type": "function", "function": annotated(f"{name}.function", found.get("function"), keys, "name")}


def tool_choice(name: str, value: Any) -> tuple[str, tuple[str, ...]]:
    """Returns `mode` and `names` of ToolUse."""
    if isinstance(value, str):
        return one_of("none", "auto", "required")(name, value), ()
    if mapping(name, value).get("type") != "allowed_tools":
        return "named", (_function_name(name, value),)
    keys: dict[str, Parse] = {"mode": one_of("auto", "required"), "tools": listed(_function_name)}
    its = f"{name}.allowed_tools"
    found = known(its, known(name, value, {"type": string, "allowed_tools": mapping}).get("allowed_tools"), keys)
    if not found.get("tools"):
        raise InvalidField(f"{its}.tools", "at least one is needed")
    return found.get("mode", "auto"), tuple(found["tools"])


def _function_name(name: str, value: Any) -> str:
    found = known(name, value, {"type": one_of("function"), "function": mapping})
    return str(known(f"{name}.function", found.get("function"), {"name": string}, "name")["name"])


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's tools. `mode`: none, auto, required or named. `names`: callable functions; empty: all.

    several: more than one call allowed. marks: the format's special tokens.
    """

    tools: tuple[dict[str, Any], ...] = ()
    mode: str = "none"
    names: tuple[str, ...] = ()
    several: bool = True
    format: Format = FORMATS["hermes"]
    marks: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode != "none" and not self.tools:
            raise InvalidField("tool_choice", "there are no tools")
        for name in self.names:
            if name not in self.schemas:
                raise InvalidField("tool_choice", f"no tool is a function named {name[:64]!r}")

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        functions = {each["function"]["name"]: each["function"] for each in self.tools}
        allowed = self.names or functions
        return {name: ANY_OBJECT | each.get("parameters", {}) for name, each in functions.items() if name in allowed}

    @property
    def structure(self) -> Structure | None:
        schemas, mode = self.schemas, self.mode
        if mode == "named":
            (name,) = schemas
            return json_schema("tools", {"$ref": arguments_of(name), "$defs": definitions(schemas)})
        if mode == "required":
            most = {} if self.several else {"maxItems": 1}
            whole = {"type": "array", "items": call_schema(schemas), "minItems": 1, **most}
            return json_schema("tools", {**whole, "$defs": definitions(schemas)})
        if mode == "none" or self.format is not FORMATS["hermes"] or self.marks:
            return None
        call = json.dumps({**_SPACED, **call_schema(schemas), "$defs": definitions(schemas)}, ensure_ascii=False)
        return made("tools", StructureKind.GRAMMAR, CALLS + call)

    @property
    def stop(self) -> tuple[str, ...]:
        """Stops the output after a call that must be the last."""
        return (self.format.end,) if self.mode == "auto" and not self.several and self.format.end else ()

    def parser(self) -> Parser:
        kinds = {"named": NamedCall, "required": RequiredCalls, "auto": MarkedCalls}
        return kinds.get(self.mode, Parser)(self.format, tuple(self.schemas), self.several)

"""Reads the tools of a chat, and what the output must match so that it calls them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.structure_schemas import moved, step
from tandem.services.http.messages import annotated
from tandem.services.http.structures import ANY_OBJECT, json_schema, made
from tandem.services.http.tool_calls import FORMATS, Delta, Format, MarkedCalls, NamedCall, Parser, RequiredCalls
from tandem.services.http.values import Parse, boolean, known, mapping, one_of, sequence, string
from tandem.speculation.types import InvalidField, Structure, StructureKind

MAX_TOOLS = 128
# llguidance's options: a space or none between JSON's parts, as models write it; keywords that it lacks are left out.
_SPACED = {"x-guidance": {"whitespace_pattern": " ?", "lenient": True}}
_MARKED = """start: (begin call "\\n"? "</tool_call>")* TEXT
TEXT: /(?s:.*)/
begin[lazy]: TEXT "<tool_call>"
call: "\\n"? %json """


def tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Parses OpenAI's tools, which are functions."""
    if len(sequence(name, value)) > MAX_TOOLS:
        raise InvalidField(name, f"{len(value)} tools are above the limit of {MAX_TOOLS}")
    found = [_tool(f"{name}[{i}]", each) for i, each in enumerate(value)]
    names = [each["function"]["name"] for each in found]
    if len(set(names)) < len(names):
        raise InvalidField(name, "two functions have one name")
    return found


def _tool(name: str, value: Any) -> dict[str, Any]:
    found = annotated(name, value, {"type": one_of("function"), "function": mapping})
    keys: dict[str, Parse] = {"name": string, "description": string, "parameters": mapping, "strict": boolean}
    function = annotated(f"{name}.function", found.get("function"), keys)
    if not function.get("name"):
        raise InvalidField(f"{name}.function.name", "missing")
    return {"type": "function", "function": function}


def tool_choice(name: str, value: Any) -> str:
    """Parses which tool is to be called; a function is returned as "function:NAME"."""
    if isinstance(value, str):
        return str(one_of("none", "auto", "required")(name, value))
    found = known(name, value, {"type": one_of("function"), "function": mapping})
    function = known(f"{name}.function", found.get("function"), {"name": string})
    return f"function:{function.get('name', '')}"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and which are to be called. `several`: more than one may be, in one answer.

    `marks`: the texts of special tokens that the format has.
    """

    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "none"
    several: bool = True
    format: Format = FORMATS["hermes"]
    marks: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.choice != "none" and not self.tools:
            raise InvalidField("tool_choice", "there are no tools")
        if self.named and self.named not in self.functions:
            raise InvalidField("tool_choice", f"no tool is a function named {self.named[:64]!r}")

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        return {each["function"]["name"]: each["function"] for each in self.tools}

    @property
    def named(self) -> str:
        """The one function to call; "" if the choice is another."""
        return self.choice.partition("function:")[2]

    @property
    def structure(self) -> Structure | None:
        """What the output must match so that it is the calls that were asked for."""
        if self.named:
            return json_schema("tools", self._with_parameters({"$ref": _pointer(self.named)}))
        if self.choice == "required":
            most = {} if self.several else {"maxItems": 1}
            return json_schema(
                "tools", self._with_parameters({"type": "array", "items": self._call, "minItems": 1, **most})
            )
        if self.choice == "none" or self.format is not FORMATS["hermes"] or self.marks:
            return None
        call = json.dumps({**_SPACED, **self._with_parameters(self._call)}, ensure_ascii=False)
        return made("tools", StructureKind.GRAMMAR, _MARKED + call)

    def _with_parameters(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns a schema that can refer to those of the functions, and says their names if they are refused."""
        named = {name: ANY_OBJECT | each.get("parameters", {}) for name, each in self.functions.items()}
        return {**schema, "$defs": {f"tools.{name}": moved(each, _pointer(name)) for name, each in named.items()}}

    @property
    def _call(self) -> dict[str, Any]:
        """The schema of a call."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": _pointer(name)}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name in self.functions
        ]
        return {"anyOf": calls}

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends the output, where one call must be the last."""
        return (self.format.end,) if self.choice == "auto" and not self.several and self.format.end else ()

    def parser(self) -> Parser:
        """Returns what parses one output."""
        if self.named:
            return NamedCall(self.format, self.named)
        if self.choice == "required":
            return RequiredCalls(self.format)
        kind = MarkedCalls if self.choice == "auto" else Parser
        return kind(self.format, frozenset(self.functions), self.several)


def _pointer(name: str) -> str:
    """Where a function's schema stands in that of calls."""
    return f"#/$defs/{step(f'tools.{name}')}"


def folded(deltas: list[Delta]) -> Delta:
    """Returns the message that deltas add up to."""
    content = "".join(each["content"] for each in deltas if "content" in each)
    calls: list[dict[str, Any]] = []
    for part in (call for each in deltas for call in each.get("tool_calls", ())):
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message: Delta = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    return {**message, "tool_calls": calls} if calls else message

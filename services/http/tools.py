"""Reads the tools of a chat, and parses the calls of them in its output."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from tandem.engine.structure_schemas import moved, step
from tandem.services.http.structures import ANY_OBJECT, json_schema
from tandem.services.http.values import boolean, known, mapping, one_of, sequence, string
from tandem.speculation.types import InvalidField, Structure

Delta = dict[str, Any]
"""What a message grows by: `content`, or `tool_calls`."""
MAX_TOOLS = 128
BEGIN, END = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


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
    found = known(name, value, {"type": one_of("function"), "function": mapping})
    keys = {"name": string, "description": string, "parameters": mapping, "strict": boolean}
    function = known(f"{name}.function", found.get("function"), keys)
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
    """The tools of a request, and which are to be called. `several`: more than one may be, in one answer."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "none"
    several: bool = True

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
        return json_schema("tools", self._required()) if self.choice == "required" else None

    def _with_parameters(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns a schema that can refer to those of the functions, and says their names if they are refused."""
        named = {name: ANY_OBJECT | each.get("parameters", {}) for name, each in self.functions.items()}
        return {**schema, "$defs": {f"tools.{name}": moved(each, _pointer(name)) for name, each in named.items()}}

    def _required(self) -> dict[str, Any]:
        """Returns the schema of a list of calls."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": _pointer(name)}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name in self.functions
        ]
        most = {} if self.several else {"maxItems": 1}
        return self._with_parameters({"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most})

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends the output, where one call must be the last."""
        return (END,) if self.choice == "auto" and not self.several else ()

    def parser(self) -> Parser:
        """Returns what parses one output."""
        if self.named:
            return NamedCall(self.named)
        if self.choice == "required":
            return RequiredCalls()
        return MarkedCalls(frozenset(self.functions)) if self.choice == "auto" else Parser()


def _pointer(name: str) -> str:
    """Where a function's schema stands in that of calls."""
    return f"#/$defs/{step(f'tools.{name}')}"


class Parser:
    """Makes deltas of a message of an output's text, as it comes. This one: all is content."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def end(self) -> list[Delta]:
        """Returns what was held back."""
        return []

    def _call(self, name: str, arguments: str) -> Delta:
        self.calls += 1
        function = {"name": name, "arguments": arguments}
        made = {"index": self.calls - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return {"tool_calls": [{**made, "function": function}]}


class NamedCall(Parser):
    """The output is the arguments of one function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def add(self, text: str) -> list[Delta]:
        if not self.calls:
            return [self._call(self._name, text)]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []


class RequiredCalls(Parser):
    """The output is a list of calls, each of which is told once it is complete."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = ""

    def add(self, text: str) -> list[Delta]:
        self._rest += text
        found: list[Delta] = []
        while "}" in text and (begin := self._rest.find("{")) >= 0:
            try:
                call, end = _DECODER.raw_decode(self._rest, begin)
            except ValueError:
                break
            found.append(self._call(call["name"], _compact(call["arguments"])))
            self._rest = self._rest[end:]
        return found

    def end(self) -> list[Delta]:
        """Returns the part of a call that was cut, as content."""
        rest = self._rest.strip("[], \n")
        return [{"content": rest}] if rest else []


class MarkedCalls(Parser):
    """Calls stand between marks (the form of Hermes, and of Qwen). What is no call of a function is content."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names, self._held, self._inside, self._after_call = names, "", False, False

    def add(self, text: str) -> list[Delta]:
        self._held += text
        found: list[Delta] = []
        while True:
            before, mark, after = self._held.partition(END if self._inside else BEGIN)
            if not mark:
                break
            found += self._between(before) if self._inside else self._content(before)
            self._held, self._inside = after, not self._inside
        if not self._inside:
            kept = _begun(self._held)
            found += self._content(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
        return found

    def end(self) -> list[Delta]:
        """Returns what was held back. A call needs no end mark at the end of the output, which may be that mark."""
        return self._between(self._held, "") if self._inside else self._content(self._held)

    def _content(self, text: str) -> list[Delta]:
        """Returns text as content, without the space between a call and what follows it."""
        text = text.lstrip() if self._after_call else text
        self._after_call = self._after_call and not text
        return [{"content": text}] if text else []

    def _between(self, text: str, end: str = END) -> list[Delta]:
        try:
            call = json.loads(text)
            if call["name"] in self._names and isinstance(call.get("arguments", {}), dict):
                self._after_call = True
                return [self._call(call["name"], _compact(call.get("arguments", {})))]
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        self._after_call = False
        return [{"content": f"{BEGIN}{text}{end}"}]


def _begun(text: str) -> int:
    """Returns how many characters at the end of the text may be the beginning of a mark."""
    return next((n for n in range(min(len(text), len(BEGIN) - 1), 0, -1) if text.endswith(BEGIN[:n])), 0)


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


def _compact(arguments: Any) -> str:
    """Returns the arguments of a call as JSON, without whitespace, as all JSON that is generated."""
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))

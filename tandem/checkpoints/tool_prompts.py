"""Adds tools and calls to prompts whose template lacks them, in the format of Hermes 2 Pro and Qwen2.5."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Any] | None
FORMATS = {
    "deepseek": "<｜tool▁calls▁begin｜>",
    "mistral": "[TOOL_CALLS]",
    "hermes": "<tool_call>",
    "llama3": "ipython",
}
"""Call formats, and the text by which templates with tools show them."""
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_NAME, _ANSWER = "tandem_function", "tandem answer"
_TOOL: dict[str, Any] = {"name": "tandem_tool", "description": "", "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": "tandemid1", "type": "function", "function": {"name": _NAME, "arguments": {}}}
_PROBE = (
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": _ANSWER, "tool_call_id": "tandemid1", "name": _NAME},
)


@dataclass(frozen=True, slots=True)
class Shown:
    """`format`: of FORMATS, or "" if the template shows no tools."""

    calls: bool
    format: str


def shown_by(template: str, render: Callable[[Sequence[Message], Sequence[Any]], str]) -> Shown:
    # Renders a chat that has all of it.
    try:
        text = render(_PROBE, [{"type": "function", "function": _TOOL}])
    except Exception:  # whatever a template raises
        text = ""
    calls = _NAME in text and _ANSWER in text
    form = next((name for name, sign in FORMATS.items() if sign in template and "tandem_tool" in text), "")
    begin = "<tool_call>" if form == "hermes" else ""
    foreign = form in ("hermes", "llama3") and not re.search(rf'{begin}\s*{{"name":\s*"{_NAME}"', text)  # no JSON
    return Shown(calls, form if calls and not foreign else "")


def forms(shown: Shown, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[Sequence[Message], Tools]]:
    """Yields messages and tools in forms that say the same, nearest to the given one first.

    Templates refuse or leave out: several calls in a message, a text beside them, system messages, users in a row.
    """
    foreign = bool(tools) and not shown.format
    if foreign:
        messages = [*messages, {"role": "system", "content": _TOOLS % "\n".join(map(_json, tools or ()))}]
    as_text = functools.partial(_with_calls, form=shown.format)
    for way in (as_text,) if foreign or not shown.calls else (list, _one_at_a_time, as_text):
        form = list(way(messages))
        if not foreign:
            yield form, tools
        fronted = _fronted(form)
        users = [{**each, "role": "user"} if each["role"] == "system" else each for each in fronted]
        yield from ((each, None if foreign else tools) for each in (fronted, [*_joined(fronted)], [*_joined(users)]))


def is_complete(messages: Sequence[Message], text: str) -> bool:
    """Whether a rendered chat has the texts that templates leave out."""
    at_risk = (each["content"] for each in messages if each["role"] == "system" or each.get("tool_calls"))
    return all(content.rpartition("</think>")[2].strip() in text for content in at_risk)


def _one_at_a_time(messages: Sequence[Message]) -> Iterator[Message]:
    # The text of a message with calls precedes them; each call precedes its answer.
    calls: list[Message] = []
    for each in messages:
        if each["role"] == "tool":
            ids = [call["tool_calls"][0].get("id") for call in calls]
            at = ids.index(each.get("tool_call_id")) if each.get("tool_call_id") in ids else 0
            yield from (*calls[at : at + 1], each)
            del calls[at : at + 1]
            continue
        yield from calls
        calls = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in each.get("tool_calls", ())]
        text = {key: value for key, value in each.items() if key != "tool_calls"}
        if not calls or any(value for key, value in text.items() if key != "role"):
            yield text
    yield from calls


def _fronted(messages: Sequence[Message]) -> list[Message]:
    systems = [each["content"] for each in messages if each["role"] == "system"]
    front = [{"role": "system", "content": "\n\n".join(systems)}] if systems else []
    return [*front, *(each for each in messages if each["role"] != "system")]


def _joined(messages: Sequence[Message], role: str = "user", gap: str = "\n\n", text: str = "%s") -> Iterator[Message]:
    # One user's message for successive ones of a role.
    for found, group in itertools.groupby(messages, lambda each: bool(each["role"] == role)):
        if found:
            yield {"role": "user", "content": gap.join(text % each["content"] for each in group)}
        else:
            yield from group


def _with_calls(messages: Sequence[Message], form: str) -> Iterator[Message]:
    # Calls become assistant's text, successive answers one user's text.
    answered = _joined(messages, "tool", "\n", "<tool_response>\n%s\n</tool_response>")
    return (_with_own_calls(each, form) for each in answered)


def _with_own_calls(message: Message, form: str) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    shown = [{name: each["function"][name] for name in ("name", "arguments")} for each in calls]
    hermes = (f"<tool_call>\n{_json(each)}\n</tool_call>" for each in shown)
    texts = [FORMATS[form] + _json(shown)] if form == "mistral" else hermes
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (message.get("content"), *texts)))}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

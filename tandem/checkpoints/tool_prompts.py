"""Adds tools and calls to prompts whose template lacks them, in the format of Hermes 2 Pro and Qwen2.5."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_TOOL = {"name": "tandem_tool", "description": "", "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": "tandemid1", "type": "function", "function": {"name": _NAME, "arguments": {}}}
_PROBE = (
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": _ANSWER, "tool_call_id": "tandemid1", "name": _NAME},
)


def format_of(template: str, render: Callable[[Sequence[Message], Tools], str]) -> str:
    """Returns the name in FORMATS of a template's call format, or "". `render` renders a chat with tools by it."""
    try:
        text = render(_PROBE, [{"type": "function", "function": _TOOL}])
    except Exception:  # whatever a template raises
        return ""
    shown = all(each in text for each in ("tandem_tool", _NAME, _ANSWER))
    found = next((name for name, sign in FORMATS.items() if sign in template and shown), "")
    begin = "<tool_call>" if found == "hermes" else ""
    foreign = found in ("hermes", "llama3") and not re.search(rf'{begin}\s*{{"name":\s*"{_NAME}"', text)  # no JSON
    return "" if foreign else found


def forms(call_format: str, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[Sequence[Message], Tools]]:
    """Yields messages and tools in forms that say the same, nearest to the given one first.

    Templates refuse or leave out: calls, several in a message, a text beside them, system messages, one role twice.
    """
    foreign = bool(tools) and not call_format
    if foreign:
        messages = [*messages, {"role": "system", "content": _TOOLS % "\n".join(map(_json, tools or ()))}]
    as_text = functools.partial(_with_calls, call_format=call_format)
    for way in (as_text,) if foreign else (list, _one_at_a_time, as_text):
        form = list(way(messages))
        if not foreign:
            yield form, tools
        fronted = _fronted(form)
        users = [{**each, "role": "user"} if each["role"] == "system" else each for each in fronted]
        joined = ([*_joined(each, ("user", "assistant"), "\n\n")] for each in (fronted, users))
        yield from ((each, None if foreign else tools) for each in (fronted, *joined))


def is_complete(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> bool:
    """Whether a template shows every text and call of such messages."""
    marked = [_marked(each, f"tandem text {i}") for i, each in enumerate(messages)]
    text = render(marked)
    return all(mark in text for mark in re.findall(r"tandem text \d+(?: call \d+)?\.", _json(marked)))


def _marked(message: Message, mark: str) -> Message:
    found = {**message, "content": f"{mark}." if message.get("content") else ""}
    if calls := message.get("tool_calls"):
        own = [{**call["function"], "arguments": {"text": f"{mark} call {i}."}} for i, call in enumerate(calls)]
        found["tool_calls"] = [{**call, "function": function} for call, function in zip(calls, own, strict=True)]
    return found


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


def _joined(messages: Sequence[Message], roles: Sequence[str], gap: str) -> Iterator[Message]:
    # Successive texts of one of the roles become one.
    def joins(each: Message) -> str:
        return str(each["role"]) if each["role"] in roles and not each.get("tool_calls") else ""

    for role, group in itertools.groupby(messages, joins):
        found = list(group)
        yield from [{**found[-1], "content": gap.join(each["content"] for each in found)}] if role else found


def _with_calls(messages: Sequence[Message], call_format: str) -> Iterator[Message]:
    # Calls become assistant's text, successive answers one user's text.
    for each in _joined(messages, ("tool",), "\n</tool_response>\n<tool_response>\n"):
        answers = f"<tool_response>\n{each['content']}\n</tool_response>"
        yield {"role": "user", "content": answers} if each["role"] == "tool" else _with_own_calls(each, call_format)


def _with_own_calls(message: Message, call_format: str) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    shown = [{name: each["function"][name] for name in ("name", "arguments")} for each in calls]
    hermes = (f"<tool_call>\n{_json(each)}\n</tool_call>" for each in shown)
    texts = [FORMATS[call_format] + _json(shown)] if call_format == "mistral" else hermes
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (message.get("content"), *texts)))}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

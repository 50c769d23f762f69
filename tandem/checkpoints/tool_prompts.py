"""Adds tools and calls to prompts whose template lacks them, in the format of Hermes 2 Pro and Qwen2.5."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
FORMATS = {
    "deepseek": "<｜tool▁calls▁begin｜>",
    "mistral": "[TOOL_CALLS]",
    "hermes": "<tool_call>",
    "llama3": "ipython",
}
"""Call formats, and the text by which templates with tools show them."""
INTRODUCTION = "You may call one or more functions to assist with the user query."
_TOOLS = f"""# Tools

{INTRODUCTION}

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


_NAME, _CONTENT, _ANSWER = "tandem_function", "tandem content", "tandem answer"
_CALL = {"id": "tandemid1", "type": "function", "function": {"name": _NAME, "arguments": {}}}
_PROBE = (
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": _CONTENT, "tool_calls": [_CALL]},
    {"role": "tool", "content": _ANSWER, "tool_call_id": "tandemid1", "name": _NAME},
)


@dataclass(frozen=True, slots=True)
class Shown:
    """`format`: of FORMATS, or "" if the template shows no tools."""

    calls: bool
    content: bool
    format: str


def shown_by(template: str, render: Callable[[Sequence[Message]], str]) -> Shown:
    # Renders a chat that has all of it.
    try:
        text = render(_PROBE)
    except Exception:  # whatever a template raises
        text = ""
    calls = _NAME in text and _ANSWER in text
    form = next((name for name, sign in FORMATS.items() if sign in template and "tools" in template), "")
    foreign = form == "hermes" and not re.search(rf'<tool_call>\s*{{"name":\s*"{_NAME}"', text)  # XML, in its marks
    return Shown(calls, _CONTENT in text, form if calls and not foreign else "")


def with_tools(
    shown: Shown, messages: Sequence[Message], tools: Sequence[Any] | None, system: bool
) -> tuple[Sequence[Message], Sequence[Any] | None]:
    """Returns a template's messages and tools; unshown ones go into the `system` role. Raises ValueError."""
    foreign = bool(tools) and not shown.format
    if foreign or not shown.calls:
        messages = list(_with_calls(messages))
    elif not shown.content and any(each.get("tool_calls") and (each.get("content") or "").strip() for each in messages):
        raise ValueError("it leaves out the content of a message that has tool_calls")
    if not (foreign and tools):
        return messages, tools
    text = _TOOLS % "\n".join(json.dumps(each, ensure_ascii=False) for each in tools)
    role = "system" if system else "user"
    at = next((i for i, each in enumerate(messages) if each["role"] == role), None)
    if at is None:
        return [{"role": role, "content": text}, *messages], None
    content = messages[at]["content"]
    both = f"{content}\n\n{text}" if system else f"{text}\n\n{content}"
    return [*messages[:at], {**messages[at], "content": both}, *messages[at + 1 :]], None


def _with_calls(messages: Iterable[Message]) -> Iterable[Message]:
    # Calls become assistant's text, successive answers one user's text.
    answers: list[str] = []
    for each in messages:
        if each["role"] == "tool":
            answers.append(f"<tool_response>\n{each['content']}\n</tool_response>")
            continue
        if answers:
            yield {"role": "user", "content": "\n".join(answers)}
            answers = []
        yield _with_own_calls(each)
    if answers:
        yield {"role": "user", "content": "\n".join(answers)}


def _with_own_calls(message: Message) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    shown = ({name: each["function"][name] for name in ("name", "arguments")} for each in calls)
    texts = [f"<tool_call>\n{json.dumps(each, ensure_ascii=False)}\n</tool_call>" for each in shown]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (message.get("content"), *texts)))}

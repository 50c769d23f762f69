"""Tells a model of tools, and shows it calls, where its chat template does not.

The format is that of Hermes 2 Pro and Qwen2.5:
https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
FORMATS = {
    "deepseek": "<｜tool▁calls▁begin｜>",
    "mistral": "[TOOL_CALLS]",
    "hermes": "<tool_call>",
    "llama3": "ipython",
}
"""Formats of calls that are read, and what a template has that tells its model of tools in one of them."""
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


def format_of(template: str) -> str:
    """The format in which a template tells its model of tools; "" if it does not, or in another."""
    return next((name for name, sign in FORMATS.items() if sign in template and "tools" in template), "")


def with_tools(
    template: str, messages: Sequence[Message], tools: Sequence[Any] | None, system: bool
) -> tuple[Sequence[Message], Sequence[Any] | None]:
    """The messages and tools for a template; `system`: tools that it does not tell of are told in that role."""
    foreign = bool(tools) and not format_of(template)
    if foreign or "tool_calls" not in template:
        messages = list(_with_calls(messages))
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
    """Writes calls as texts of the assistant, and the answers that follow one another as one text of the user."""
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

"""Messages of a chat, for the model's template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.speculation.errors import InvalidField

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128
MAX_CALLS_OF_CHAT = 1024  # each call's JSON is parsed before anything else
MOST_DEPTH = 64  # nested levels of JSON


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An assistant's call of a tool; `arguments` are JSON."""

    id: str
    name: str
    arguments: str = "{}"

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidField("tool_calls", "a call has no name")
        _ = self.parsed

    @property
    def parsed(self) -> Any:
        """The arguments for templates. Raises InvalidField."""
        try:
            found = json.loads(self.arguments or "{}")
            if "\\u" in self.arguments:
                json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate is no text, and no tokenizer takes it
        except (ValueError, RecursionError):
            raise InvalidField("tool_calls", "the arguments of a call are not JSON") from None
        if deeper_than(found, MOST_DEPTH):
            raise InvalidField("tool_calls", f"the arguments of a call are nested deeper than {MOST_DEPTH} levels")
        return found


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    content: str = ""
    name: str = ""  # the speaker's
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # the call that a tool answers

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidField("role", f"{self.role[:32]!r} is not one of {', '.join(ROLES)}")
        if len(self.tool_calls) > MAX_TOOL_CALLS:
            raise InvalidField("tool_calls", f"{len(self.tool_calls)} are above the limit of {MAX_TOOL_CALLS}")
        if self.tool_calls and self.role != "assistant":
            raise InvalidField("tool_calls", f"of the role {self.role}: an assistant makes them")
        if self.tool_call_id and self.role != "tool":
            raise InvalidField("tool_call_id", f"of the role {self.role}: a tool answers them")

    @property
    def for_template(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        found |= {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key))}
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": each.id, "type": "function", "function": {"arguments": each.parsed, "name": each.name}}
                for each in self.tool_calls
            ]
        return found

    @property
    def length(self) -> int:
        """Characters of all texts."""
        calls = sum(len(each.id) + len(each.name) + len(each.arguments) for each in self.tool_calls)
        return len(self.content) + len(self.name) + len(self.tool_call_id) + calls


def check_counts(calls: Sequence[int]) -> None:
    """Raises InvalidField for too many messages or tool calls. `calls`: per message."""
    if len(calls) > MAX_MESSAGES:
        raise InvalidField("messages", f"{len(calls)} are above the limit of {MAX_MESSAGES}")
    for i, count in enumerate(calls):
        if count > MAX_TOOL_CALLS:
            raise InvalidField(f"messages[{i}].tool_calls", f"{count} are above the limit of {MAX_TOOL_CALLS}")
    if (total := sum(calls)) > MAX_CALLS_OF_CHAT:
        raise InvalidField("messages", f"{total} calls of tools are above the limit of {MAX_CALLS_OF_CHAT}")


def check_chat(messages: tuple[ChatMessage, ...], chat: bool) -> None:
    """Raises InvalidField for no or too many messages, or with the option `chat`, which is for texts."""
    if chat:
        raise InvalidField("chat", "is for a text; messages are a chat without it")
    if not messages:
        raise InvalidField("messages", "empty: at least one message is needed")
    check_counts([len(each.tool_calls) for each in messages])


def deeper_than(value: Any, most: int) -> bool:
    level, depth = [value], 0
    while level:
        if depth > most:
            return True
        inner: list[Any] = []
        for each in level:
            inside = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
            inner += [one for one in inside if isinstance(one, dict | list)]
        level, depth = inner, depth + 1
    return False

"""Parses chat messages in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.hints import meant
from tandem.speculation.chat import ChatMessage, ToolCall
from tandem.speculation.errors import InvalidField, WrongType

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_CALL_KEYS = ("id", "type", "index", "function")
_LARGEST_FILE = 16 * 1024 * 1024


def check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidField(name, "has a lone surrogate, which is no character") from None


def chat_of(messages: Sequence[Mapping[str, Any]] | None) -> tuple[ChatMessage, ...] | None:
    return None if messages is None else tuple(_message(f"messages[{i}]", each) for i, each in enumerate(messages))


def read_chat(file: str) -> tuple[ChatMessage, ...]:
    text = _text_of(f"messages: {file}", Path(file))
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"messages: {file} is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"messages: {file} is not JSON: {error}") from None
    if not isinstance(found, list):
        raise ValueError(f'messages: {file} is not a JSON list, as [{{"role": "user", "content": "Hello"}}]')
    return tuple(map(_message, (f"messages[{i}]" for i in range(len(found))), found))


def _message(name: str, value: Any) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise WrongType(name, 'a dictionary with "role" and "content"', value)
    _known(name, value, _KEYS)
    calls = value.get("tool_calls") or ()
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise WrongType(f"{name}.tool_calls", "a list of calls", calls)
    if value.get("content") is None and not calls:
        raise InvalidField(f"{name}.content", "missing")
    texts = {key: _text(f"{name}.{key}", value.get(key)) for key in ("content", "name", "tool_call_id")}
    made = tuple(_call(f"{name}.tool_calls[{i}]", each) for i, each in enumerate(calls))
    if "role" not in value:
        raise InvalidField(f"{name}.role", "missing")
    try:
        return ChatMessage(role=_text(f"{name}.role", value["role"]), tool_calls=made, **texts)
    except InvalidField as error:
        raise InvalidField(f"{name}.{error.field.removeprefix(f'{name}.')}", error.fault) from None


def _call(name: str, value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping):
        raise WrongType(name, 'a dictionary with "id" and "function"', value)
    _known(name, value, _CALL_KEYS)
    _known(f"{name}.function", function, ("name", "arguments"))
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError):
            raise WrongType(f"{name}.function.arguments", "JSON", arguments) from None
    try:
        return ToolCall(
            _text(f"{name}.id", value.get("id")), _text(f"{name}.function.name", function.get("name")), arguments
        )
    except InvalidField as error:
        if isinstance(error, WrongType):
            raise
        raise InvalidField(name, error.fault) from None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | None):
        raise WrongType(name, "a string", value)
    check_text(name, value or "")
    return value or ""


def _known(name: str, value: Mapping[Any, Any], keys: Sequence[str]) -> None:
    for key in value:
        if key not in keys:
            hint = meant(str(key), keys)
            raise InvalidField(f"{name}.{key}", f"is not served; known are {', '.join(keys)}{hint}")


def _text_of(what: str, path: Path) -> str:
    """Returns a file's text, of at most 16 MiB. Raises ValueError."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise ValueError(f"{what} has more than {_LARGEST_FILE} bytes")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{what} does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"{what} cannot be read: {error.strerror}") from None


def read_prompts(path: Path) -> tuple[tuple[int, str], ...]:
    """Returns line numbers from 1 and non-empty lines. Raises ValueError."""
    lines = enumerate(_text_of(f"prompt file {path}", path).splitlines(), 1)
    found = tuple((number, line.strip()) for number, line in lines if line.strip())
    if not found:
        raise ValueError(f"prompt file {path} is empty: write one prompt per line")
    return found

"""Parses chat messages for templates."""

from __future__ import annotations

import json
from typing import Any

from tandem.services.http.values import Parse, known, listed, mapping, one_of, refused, sequence, string
from tandem.speculation.chat import ROLES, check_counts
from tandem.speculation.types import InvalidField

ANNOTATIONS = (
    *("id", "cache_control", "provider_specific_fields", "extra_content", "index", "annotations", "parsed"),
    *("thinking_blocks", "reasoning_details", "parsed_arguments", "weight", "status", "metadata", "citations"),
)
"""Keys that SDKs echo; ignored, as no template has them."""
REASONING = ("reasoning_content", "reasoning", "thinking")


def annotated(name: str, value: Any, keys: dict[str, Parse], needed: str = "") -> dict[str, Any]:
    own = {key: one for key, one in mapping(name, value).items() if key in keys or key not in ANNOTATIONS}
    return known(name, own, keys, needed)


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Raises InvalidField naming message and key."""
    if not sequence(name, value):
        raise InvalidField(name, "empty: at least one message is needed")
    given = [each.get("tool_calls") if isinstance(each, dict) else None for each in value]
    check_counts([len(calls) if isinstance(calls, list) else 0 for calls in given])
    return [_message(f"{name}[{i}]", each) for i, each in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, Any]:
    role = one_of(*ROLES)(f"{name}.role", mapping(name, value).get("role"))
    keys: dict[str, Parse] = {"role": string, "name": string, "content": _text}
    if role == "assistant":
        keys |= {"tool_calls": listed(_call), "refusal": string, **dict.fromkeys(REASONING, string)}
    if role == "tool":
        keys |= {"tool_call_id": string}
    found = annotated(name, value, keys)
    if "content" not in found and role not in ("assistant", "tool"):
        raise InvalidField(f"{name}.content", "missing")
    text = found.get("content", "") or found.get("refusal", "")
    rest = {key: one for key, one in found.items() if key not in ("role", "content", "refusal") and one}
    return {"role": "system" if role == "developer" else role, "content": text, **rest}


def _text(name: str, value: Any, between: str = "\n") -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(name, value, "a text or a list of parts")
    parts = []
    for i, part in enumerate(value):
        kind = mapping(f"{name}[{i}]", part).get("type")
        if kind not in ("text", "refusal"):
            raise InvalidField(f"{name}[{i}].type", f"{str(kind)[:32]!r} is not served: parts are text")
        parts.append(annotated(f"{name}[{i}]", part, {"type": string, kind: string}).get(kind, ""))
    return between.join(parts)


def prediction(name: str, value: Any) -> str:
    found = known(name, value, {"type": one_of("content"), "content": lambda name, content: _text(name, content, "")})
    if "content" not in found:
        raise InvalidField(f"{name}.content", "missing")
    return str(found["content"])


def _call(name: str, value: Any) -> dict[str, Any]:
    found = annotated(name, value, {"id": string, "type": one_of("function"), "function": mapping})
    keys: dict[str, Parse] = {"name": string, "arguments": _arguments}
    function = annotated(f"{name}.function", found.get("function"), keys, "name")
    return {"id": found.get("id", ""), "type": "function", "function": {"arguments": {}, **function}}


def _arguments(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return value
    try:
        return json.loads(string(name, value) or "{}")
    except (ValueError, RecursionError):
        raise InvalidField(name, "not JSON") from None

"""Renders chats in jinja2's sandbox, as transformers does; untrusted templates see plain, immutable data only."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(jinja2.ext.Extension):
    """The tag `generation`, which renders its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own way)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        return str(caller())


class _Dict:
    """`dict` in templates, without the type's attributes."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` in templates, without names that begin with an underscore."""

    def __init__(*given: Any, **named: Any) -> None:
        self, *rest = given
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no {name!r:.60}, which begins with an underscore")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@functools.lru_cache
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    ours = {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    environment.globals.update(ours)
    return environment.from_string(template)


def chosen(template: str | Mapping[str, str], tools: Sequence[Any] | None) -> str:
    """Returns the template for tools or the default. Raises ValueError."""
    if isinstance(template, str):
        return template
    for name in ("tool_use",) if tools is not None and "tool_use" in template else ("default",):
        if name in template:
            return template[name]
    raise ValueError(f"it has several chat templates and none by default: {', '.join(sorted(template))}")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    **options: Any,
) -> str:
    if not messages:
        raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if not all(isinstance(each, dict) for each in tools or ()):
        raise ValueError("Tools should be a list of objects")
    chat = [_aliased(_plain({k: v for k, v in message.items() if v is not None})) for message in messages]
    return _compiled(template).render(
        messages=chat,
        tools=_plain(None if tools is None else list(tools)),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **_plain(options),
    )


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda other: f"<{type(other).__name__}>"))

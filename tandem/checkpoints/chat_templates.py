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
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


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
    documents: Sequence[Any] | None = None,
    continue_final_message: bool | str = False,
    add_generation_prompt: bool = False,
    **options: Any,
) -> str:
    if not messages:
        raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt are not compatible")
    for what, values in (("Tools", tools), ("Documents", documents)):
        if not all(isinstance(each, dict) for each in values or ()):
            raise ValueError(f"{what} should be a list of objects")
    chat = [_aliased(_plain({k: v for k, v in message.items() if v is not None})) for message in messages]
    said = _marked(template, chat, continue_final_message) if continue_final_message else None
    text = _compiled(template).render(
        messages=chat,
        tools=_plain(None if tools is None else list(tools)),
        documents=_plain(None if documents is None else list(documents)),
        add_generation_prompt=add_generation_prompt,
        **_plain(options),
    )
    return text if said is None else _continued(text, said)


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else list(map(_plain, value))
    return f"<{type(value).__name__}>"


def _marked(template: str, chat: list[dict[str, Any]], continued: bool | str) -> str:
    name = continued if isinstance(continued, str) else "content"
    said = chat[-1].get(name)
    if said is None:
        raise ValueError(f'continue_final_message is set but the final message has no "{name}" to continue!')
    names = [name] if name not in _REASONING else [each for each in _REASONING if chat[-1].get(each) == said]
    if not any(each in template for each in names):
        raise ValueError(f'continue_final_message is set to "{name}" but the chat template does not read it')
    if isinstance(said, list | tuple):
        for part in reversed(said):
            if "text" in part:
                text = str(part["text"])
                part["text"] = text + _TAG
                return text
        raise ValueError("continue_final_message is set but the final message has no text to continue!")
    for each in names:
        chat[-1][each] = said + _TAG
    return str(said)


def _continued(text: str, said: str) -> str:
    if said.strip() not in text or _TAG.strip() not in text:
        raise ValueError("continue_final_message is set but the chat template does not show the final message whole")
    at = text.rindex(_TAG.strip())
    return text[:at] if text[at : at + len(_TAG)] == _TAG else text[:at].rstrip()

"""Adds request arguments to signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, ParamSpec, TypeVar, get_type_hints

from tandem.speculation.request import GenerationRequest, RequestOptions

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_OPTIONS = get_type_hints(RequestOptions, include_extras=True)
MEANINGS = {
    "prompt": "text, or token ids. Without it, give `messages`.",
    "sampling": "how tokens are drawn. None: the server's defaults, greedy unless its operator or its model's files "
    "say otherwise.",
    "stop": "a string, or several, that end the output and are cut from it.",
    "timeout": "seconds for the whole request, waits and retries included. None: no limit.",
} | {name: hint.__metadata__[1] for name, hint in _OPTIONS.items()}


def with_options(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Lists request options in the signature and explains all arguments."""
    own = inspect.signature(method)
    kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(name), annotation=_shown(hint))
        for name, hint in _OPTIONS.items()
    ]
    method.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return explained(method)


def explained(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    names = [name for name in inspect.signature(method).parameters if name in MEANINGS]
    listed = "\n".join(f"    {name}: {MEANINGS[name]}" for name in names)
    raised = (
        "    TandemError: the call failed, or an argument is wrong; then it is a ValueError or a TypeError too, it is "
        "raised\n    before any call, and its `field` names the argument."
    )
    method.__doc__ = f"{inspect.getdoc(method)}\n\nArgs:\n{listed}\n\nRaises:\n{raised}"
    return method


def _default(name: str) -> Any:
    found = next(each.default for each in fields(GenerationRequest) if each.name == name)
    assert found is not MISSING
    return getattr(found, "value", found)


def _shown(hint: Any) -> str:
    return inspect.formatannotation(hint.__origin__).replace("collections.abc.", "")

"""Checks the types of Python callers' arguments; errors name the argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tandem.hints import meant
from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.credentials import Credentials
from tandem.speculation.errors import NoSuchOption, WrongType
from tandem.speculation.request import RequestOptions
from tandem.speculation.types import InvalidField, SamplingParams

Check = Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _sequence_of(value: Any, each: Check) -> bool:
    return isinstance(value, Sequence) and all(map(each, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


_OPTIONS = get_type_hints(RequestOptions, include_extras=True)


def _fits(kind: Any, value: Any) -> bool:
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return any(_fits(each, value) for each in get_args(kind))
    if kind is int:
        return _whole(value)
    if get_origin(kind) is Sequence:
        return not isinstance(value, str) and _sequence_of(value, lambda each: isinstance(each, Mapping))
    return isinstance(value, kind)


def check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidField(name, "has a lone surrogate, which is no character") from None


def check_request(prompt: Any, sampling: Any, stop: Any, timeout: Any, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _OPTIONS:
            raise NoSuchOption(name, meant(name, _OPTIONS))
        if not _fits(_OPTIONS[name].__origin__, value):
            raise WrongType(name, _OPTIONS[name].__metadata__[0], value)
        check_text(name, value if isinstance(value, str) else "")
    if not (prompt is None or isinstance(prompt, str) or _sequence_of(prompt, _whole)):
        raise WrongType("prompt", "a text, or a list of token ids", prompt)
    if not (sampling is None or isinstance(sampling, SamplingParams)):
        raise WrongType("sampling", "a tandem.SamplingParams, or None", sampling)
    if not (isinstance(stop, str) or _sequence_of(stop, _text)):
        raise WrongType("stop", "a string, or a list of strings", stop)
    check_text("prompt", prompt if isinstance(prompt, str) else "")
    check_text("stop", stop if isinstance(stop, str) else "".join(stop))
    if stop == "" or (not isinstance(stop, str) and "" in stop):
        raise InvalidField("stop", "an empty string would end every generation")
    if timeout is not None:
        check_seconds("timeout", timeout, "a number of seconds above 0, or None")
        if not timeout > 0:
            raise InvalidField("timeout", f"{timeout} is not above 0")


def check_seconds(name: str, value: Any, expected: str = "a number of seconds") -> None:
    if not _number(value):
        raise WrongType(name, expected, value)
    if math.isnan(value) or value < 0:
        raise InvalidField(name, f"{value} is below 0" if value < 0 else "nan is no number of seconds")


def check_connecting(
    endpoints: Any, service: Any, credentials: Any, retry_seconds: Any, wait_seconds: Any, name: str = "endpoints"
) -> str:
    """Returns a client's endpoints, comma-separated. Raises InvalidField. `name`: of the endpoints' argument."""
    if not (isinstance(endpoints, str) or (_sequence_of(endpoints, _text) and endpoints)):
        raise WrongType(name, 'a string "HOST:PORT", or a list of them', endpoints)
    if service not in (None, TARGET, FUSED, DRAFT):
        raise InvalidField("service", f"{service!r} is not one of {TARGET}, {FUSED}, {DRAFT}")
    if not (credentials is None or isinstance(credentials, Credentials)):
        raise WrongType("credentials", "a tandem.Credentials, or None", credentials)
    check_seconds("retry_seconds", retry_seconds)
    check_seconds("wait_seconds", wait_seconds)
    return endpoints if isinstance(endpoints, str) else ",".join(endpoints)

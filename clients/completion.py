"""The public API's requests, their checked arguments, and completions."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from tandem.clients.messages import chat_of, check_text
from tandem.hints import meant
from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.credentials import Credentials
from tandem.speculation.errors import NoSuchOption, WrongType
from tandem.speculation.request import RequestOptions, members
from tandem.speculation.types import (
    SAMPLING_FIELDS,
    Chunk,
    FinishReason,
    GenerationEnd,
    GenerationRequest,
    InvalidField,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # which Python has from 3.11 on

Prompt: TypeAlias = str | Sequence[int]  # text or token ids

Events: TypeAlias = AsyncGenerator[Chunk | GenerationEnd, None]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished continuation. If requested: `logprobs`, one per token; `receipt`, signed JSON."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    statistics: SpeculationStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    receipt: str = ""


async def completion_of(events: Events) -> Completion:
    chunks, end = list[Chunk](), None
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, GenerationEnd):
                end = event
            else:
                chunks.append(event)
    assert end is not None, "a generation ends with a GenerationEnd"
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    logprobs = tuple(each for chunk in chunks for each in chunk.logprobs)
    counts = end.finish_reason, end.prompt_tokens, end.output_tokens, end.stats
    return Completion("".join(chunk.text for chunk in chunks), tokens, *counts, logprobs, end.receipt)


async def chunks_of(events: Events) -> AsyncGenerator[Chunk, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Chunk):
                yield event


def request_of(
    prompt: Prompt | None,
    sampling: SamplingParams | None,
    stop: str | Sequence[str],
    timeout: float | None = None,
    deadline: float | None = None,
    **options: Unpack[RequestOptions],
) -> GenerationRequest:
    """Builds a request; `sampling` None: the server's defaults. Raises InvalidField, a TandemError."""
    check_request(prompt, sampling, stop, timeout, options)
    given: dict[str, Any] = {**options, **members(options), "messages": chat_of(options.get("messages"))}
    return GenerationRequest(
        text=prompt if isinstance(prompt, str) else None,
        token_ids=None if prompt is None or isinstance(prompt, str) else tuple(prompt),
        sampling=sampling or SamplingParams(),
        unset_sampling=frozenset() if sampling else frozenset(SAMPLING_FIELDS),
        stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        deadline=deadline,
        **given,
    )


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


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
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

"""OpenAI's and vLLM's fields: served, ignored, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.hints import meant
from tandem.services.http.chat_messages import messages, prediction
from tandem.services.http.constraints import response_format, structured_outputs, tool_choice, tools
from tandem.services.http.values import (
    Parse,
    boolean,
    integer,
    known,
    listed,
    mapping,
    number,
    one_of,
    only,
    sequence,
    string,
)
from tandem.speculation.request import MAX_LOGPROBS, Drafts
from tandem.speculation.types import InvalidField

MAX_CHOICES = 128
MOST = 2**31 - 1
_token = integer(0, MOST)


def _stop(name: str, value: Any) -> list[str]:
    return [value] if isinstance(value, str) else listed(string)(name, value)


def _prompts(name: str, value: Any) -> list[str | tuple[int, ...]]:
    if isinstance(value, str):
        return [value]
    if not sequence(name, value):
        raise InvalidField(name, "empty: at least one prompt is needed")
    if isinstance(value[0], int):
        return [tuple(listed(_token)(name, value))]
    if len(value) > MAX_CHOICES:
        raise InvalidField(name, f"{len(value)} prompts are above the limit of {MAX_CHOICES}")
    return [
        each if isinstance(each, str) else tuple(listed(_token)(f"{name}[{i}]", each)) for i, each in enumerate(value)
    ]


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    found = {}
    for key, bias in mapping(name, value).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidField(name, f"{key[:20]!r} is not a token id")
        found[int(key)] = number(f"{name}.{key}", bias)
    return tuple(sorted(found.items()))


def _top_k(name: str, value: Any) -> int:
    return max(0, int(integer(-1, MOST)(name, value)))


def _stream_options(name: str, value: Any) -> dict[str, Any]:
    keys = {"include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": only(False)}
    return known(name, value, keys)


def _template_options(name: str, value: Any) -> dict[str, Any]:
    own = ("self", "template", "messages", "tools", "documents", "add_generation_prompt")
    for key in mapping(name, value):
        if not key.isidentifier() or key in own:
            raise InvalidField(f"{name}.{key}", "not a variable that a request may give to a template")
    return dict(value)


_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_SWITCHES = ("ignore_eos", "stream", "add_special_tokens", "return_token_ids", "receipt")
_BOTH: dict[str, Parse] = {
    "model": string,
    "n": integer(1, MAX_CHOICES),
    "max_tokens": integer(1, MOST, absent=-1),
    **dict.fromkeys(_NUMBERS, number),
    **dict.fromkeys(_SWITCHES, boolean),
    "top_k": _top_k,
    "seed": integer(-(2**63), 2**64 - 1, absent=-1),
    "stop": _stop,
    "stop_token_ids": listed(_token),
    "logit_bias": _biases,
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "stream_options": _stream_options,
    "cache_salt": string,
    "drafts": one_of(*(each.value for each in Drafts)),
    "speculation_length": _token,
    "prediction": prediction,
}
SERVED: Mapping[str, Mapping[str, Parse]] = {
    "chat": {
        **_BOTH,
        "messages": messages,
        "max_completion_tokens": integer(1, MOST, absent=-1),
        "logprobs": boolean,
        "top_logprobs": integer(0, MAX_LOGPROBS),
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": boolean,
        "chat_template_kwargs": _template_options,
    },
    "completions": {**_BOTH, "prompt": _prompts, "logprobs": integer(0, MAX_LOGPROBS)},
}
LABELS: Mapping[str, Parse] = {
    "metadata": mapping,
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), string),
}  # no effect on the output
_OFF = ("store", "use_beam_search", "early_stopping", "include_stop_str_in_output", "echo", "continue_final_message")
FIXED: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys((*_OFF, "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("include_reasoning", "skip_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("min_tokens", "priority"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("bad_words", "logits_processors"), ([],)),
    "vllm_xargs": ({},),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "spaces_between_special_tokens": (True, False),
}
"""Fields that are served with these values alone, which change nothing."""
INSTEAD: Mapping[str, str] = {
    "functions": "tools",
    "function_call": "tool_choice",
    "request_id": "the header x-request-id",
    "allowed_token_ids": "logit_bias",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"),
}


def read(of: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Parses a body for "chat" or "completions"; null is absent. Raises InvalidField."""
    found = {}
    for name, value in body.items():
        if value is None:
            continue
        parse = SERVED[of].get(name) or LABELS.get(name) or (only(*FIXED[name]) if name in FIXED else None)
        if parse is None:
            hint = f"; use {INSTEAD[name]}" if name in INSTEAD else meant(name[:64], (*SERVED[of], *LABELS, *FIXED))
            raise InvalidField(name[:64], f"not a field of {of} that is served here{hint}")
        if (parsed := parse(name, value)) is not None:
            found[name] = parsed
    if "stream_options" in found and not found.get("stream"):
        raise InvalidField("stream_options", "given without stream")
    if of == "chat" and not found.pop("logprobs", False):
        if "top_logprobs" in found:
            raise InvalidField("top_logprobs", "given without logprobs")
    elif of == "chat":
        found["logprobs"] = found.get("top_logprobs", 0)  # how many likeliest tokens, as in completions
    return found

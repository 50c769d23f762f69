"""The table of fields: each of OpenAI's and vLLM's is served, accepted with one value, a label, or refused by name."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.hints import meant
from tandem.services.http import values
from tandem.services.http.messages import messages, prediction
from tandem.services.http.structures import response_format, structured_outputs
from tandem.services.http.tools import tool_choice, tools
from tandem.services.http.values import Parse, as_happens, boolean, integer, listed, mapping, never, number, string
from tandem.speculation.request import MAX_LOGPROBS, Drafts
from tandem.speculation.types import InvalidField

CHAT, COMPLETIONS = ("chat",), ("completions",)
BOTH = (*CHAT, *COMPLETIONS)
MAX_CHOICES = 128
MOST = 2**31 - 1


class Kind(enum.Enum):
    """What becomes of a field."""

    SERVED = "served"
    ACCEPTED = "accepted"
    LABEL = "label"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of requests `of` chat or completions. `parse` returns its value, or refuses it."""

    kind: Kind
    of: tuple[str, ...]
    parse: Parse


def _stop(name: str, value: Any) -> list[str]:
    return [value] if isinstance(value, str) else listed(string)(name, value)


def _prompts(name: str, value: Any) -> list[str | tuple[int, ...]]:
    """Parses a text, token ids, or a list of either."""
    token = integer(0, MOST)
    if isinstance(value, str):
        return [value]
    if not values.sequence(name, value):
        raise InvalidField(name, "empty: at least one prompt is needed")
    if isinstance(value[0], int):
        return [tuple(listed(token)(name, value))]
    if len(value) > MAX_CHOICES:
        raise InvalidField(name, f"{len(value)} prompts are above the limit of {MAX_CHOICES}")
    return [
        each if isinstance(each, str) else tuple(listed(token)(f"{name}[{i}]", each)) for i, each in enumerate(value)
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
    plain = as_happens(False, why="events are not padded here")
    keys = {"include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": plain}
    return values.known(name, value, keys)


def _template_options(name: str, value: Any) -> dict[str, Any]:
    for key in mapping(name, value):
        if not key.isidentifier() or key in _OF_TEMPLATES:
            raise InvalidField(f"{name}.{key}", "not a variable that a request may give to a template")
    return dict(value)


_OF_TEMPLATES = (
    *("messages", "conversation", "tools", "documents", "chat_template", "tokenize", "tokenizer_kwargs"),
    *("add_generation_prompt", "continue_final_message", "return_tensors", "return_dict", "padding", "truncation"),
    *("max_length", "return_assistant_tokens_mask", "self"),
)


def _served(of: tuple[str, ...], **parsers: Parse) -> dict[str, Field]:
    return {name: Field(Kind.SERVED, of, parse) for name, parse in parsers.items()}


def _accepted(why: str, *happens: Any, names: tuple[str, ...], of: tuple[str, ...] = BOTH) -> dict[str, Field]:
    return {name: Field(Kind.ACCEPTED, of, as_happens(*happens, why=why)) for name in names}


def _refused(why: str, *names: str, of: tuple[str, ...] = BOTH) -> dict[str, Field]:
    return {name: Field(Kind.REFUSED, of, never(why)) for name in names}


FIELDS: Mapping[str, Field] = {
    **_served(
        BOTH,
        model=string,
        n=integer(1, MAX_CHOICES),
        max_tokens=values.unless(-1, integer(0, MOST)),
        temperature=number,
        top_p=number,
        top_k=_top_k,
        min_p=number,
        seed=values.unless(-1, integer(-(2**63), 2**64 - 1)),
        stop=_stop,
        stop_token_ids=listed(integer(0, MOST)),
        ignore_eos=boolean,
        presence_penalty=number,
        frequency_penalty=number,
        repetition_penalty=number,
        logit_bias=_biases,
        response_format=response_format,
        guided_json=structured_outputs("json"),
        guided_regex=structured_outputs("regex"),
        guided_choice=structured_outputs("choice"),
        guided_grammar=structured_outputs("grammar"),
        structured_outputs=structured_outputs(),
        stream=boolean,
        stream_options=_stream_options,
        truncate_prompt_tokens=integer(1, MOST),
        add_special_tokens=boolean,
        return_token_ids=boolean,
        return_tokens_as_token_ids=boolean,
        cache_salt=string,
        request_id=string,
        drafts=values.one_of(*(each.value for each in Drafts)),
        speculation_length=integer(0, MOST),
        prediction=prediction,
        receipt=boolean,
    ),
    **_served(
        CHAT,
        messages=messages,
        max_completion_tokens=values.unless(-1, integer(1, MOST)),
        top_logprobs=integer(0, MAX_LOGPROBS),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=boolean,
        add_generation_prompt=boolean,
        continue_final_message=boolean,
        documents=listed(mapping),
        chat_template_kwargs=_template_options,
    ),
    **_served(COMPLETIONS, prompt=_prompts, echo=boolean),
    "logprobs": Field(Kind.SERVED, BOTH, lambda name, value: value),  # a boolean of chat, a count of completions
    **_accepted("answers are not kept here", False, names=("store",), of=CHAT),
    **_accepted("there is one tier", "auto", "default", names=("service_tier",), of=CHAT),
    **_accepted("text alone is made", ["text"], names=("modalities",), of=CHAT),
    **_accepted("the model is not told how much to say", "medium", names=("verbosity",), of=CHAT),
    **_accepted("prefixes are kept in memory alone", "in_memory", names=("prompt_cache_retention",), of=CHAT),
    **_accepted("reasoning is not told from the answer", True, names=("include_reasoning",), of=CHAT),
    "best_of": Field(Kind.ACCEPTED, BOTH, integer(1, MAX_CHOICES)),  # 1, or n
    **_accepted("beams are not searched", False, names=("use_beam_search", "early_stopping")),
    **_accepted("it is for beam search, which is not served", 1, names=("length_penalty",)),
    **_accepted("not served: the end may come with any token", 0, names=("min_tokens",)),
    **_accepted("special tokens have no text here", True, names=("skip_special_tokens",)),
    **_accepted("not served", True, False, names=("spaces_between_special_tokens",)),
    **_accepted("the text ends before its stop string", False, names=("include_stop_str_in_output",)),
    **_accepted("requests wait in turn", 0, names=("priority",)),
    **_accepted("llguidance is what enforces structures", "auto", "guidance", names=("guided_decoding_backend",)),
    **_accepted("not served", [], names=("bad_words", "logits_processors")),
    **_accepted("not served", {}, names=("vllm_xargs",)),
    **_accepted("inserting text is not served", "", names=("suffix",), of=COMPLETIONS),
    **{
        name: Field(Kind.LABEL, of, parse)
        for name, of, parse in (
            ("user", BOTH, string),
            ("metadata", CHAT, mapping),
            ("safety_identifier", CHAT, string),
            ("prompt_cache_key", CHAT, string),
        )
    },
    **_refused("use tools and tool_choice", "functions", "function_call", of=CHAT),
    **_refused("text alone is read and made", "audio", "mm_processor_kwargs", of=CHAT),
    **_refused("this server searches nothing", "web_search_options", of=CHAT),
    **_refused("nothing is moderated here", "moderation", of=CHAT),
    **_accepted("reasoning has no effort of its own here", "none", names=("reasoning_effort",), of=CHAT),
    **_refused("reasoning has no effort of its own here", "thinking_token_budget", of=CHAT),
    **_refused("prefixes are kept by the server's own rule", "prompt_cache_options", of=CHAT),
    **_refused("the model's own template is used", "chat_template", of=CHAT),
    **_refused("log-probabilities are of the output alone", "prompt_logprobs"),
    **_refused("not served: bias single tokens with logit_bias", "allowed_token_ids"),
    **_refused("JSON has no whitespace here; a schema may ask for it", "guided_whitespace_pattern"),
    **_refused("structures are JSON schemas, regular expressions, choices and grammars", "structural_tag"),
    **_refused("pages come from PrefillWorkers: --prefill", "kv_transfer_params"),
    **_refused("prompts are texts and token ids", "prompt_embeds", of=COMPLETIONS),
    **_refused("this server has one rank that answers", "data_parallel_rank"),
}
"""Every field, by its name."""


def read(of: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request for "chat" or "completions". Null, and what a field has for it, is absent."""
    found = {}
    for name, value in body.items():
        if value is None:
            continue
        field = FIELDS.get(name)
        if field is None or of not in field.of:
            names = [each for each, its in FIELDS.items() if of in its.of]
            raise InvalidField(name[:64], f"unknown field of {of}{meant(name[:64], names)}")
        if (parsed := field.parse(name, value)) is not None:
            found[name] = parsed
    if of == "chat" and found.get("max_tokens") == 0:
        raise InvalidField("max_tokens", f"0 is outside 1 to {MOST}")
    if found.get("best_of", 1) not in (1, found.get("n", 1)):
        raise InvalidField("best_of", "all choices are answered: it can only be n")
    if "stream_options" in found and not found.get("stream"):
        raise InvalidField("stream_options", "given without stream")
    _read_logprobs(of, found)
    return found


def _read_logprobs(of: str, found: dict[str, Any]) -> None:
    """Makes `logprobs` the number of likeliest tokens to report, in both kinds of requests."""
    given = found.pop("logprobs", None)
    if of == "completions":
        if given is not None:
            found["logprobs"] = integer(0, MAX_LOGPROBS)("logprobs", given)
        return
    wanted = given is not None and boolean("logprobs", given)
    if "top_logprobs" in found and not wanted:
        raise InvalidField("top_logprobs", "given without logprobs")
    if wanted:
        found["logprobs"] = found.get("top_logprobs", 0)

"""Each field over HTTP: served, or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.services.http.fields import FIXED, INSTEAD
from tandem.services.http.fields import SERVED as PARSERS
from tests.http.site import CHAT, COMPLETIONS, HELLO, Site, at_door, door
from tests.support import ForgetfulRunner

WITHOUT_WHITESPACE = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": WITHOUT_WHITESPACE}}]
SERVED: dict[str, Any] = {
    "model": "toy",
    "n": 2,
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "seed": -3,
    "stop": "e",
    "stop_token_ids": [101],
    "ignore_eos": True,
    "presence_penalty": 2,
    "frequency_penalty": 2,
    "repetition_penalty": 2,
    "logit_bias": {"65": 100},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WITHOUT_WHITESPACE}},
    "structured_outputs": {"choice": ["yes"]},
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "add_special_tokens": True,
    "return_token_ids": True,
    "cache_salt": "a",
    "drafts": "none",
    "speculation_length": 1,
    "prediction": {"type": "content", "content": [{"type": "text", "text": "abc"}, {"type": "text", "text": "d"}]},
    "receipt": False,  # tests/services/test_receipts.py has a server with keys
    "messages": HELLO,
    "top_logprobs": 2,
    "tools": TOOLS,
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "prompt": [[104, 105]],
}
"""A value of each field that is served."""
WITH = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}, "tool_choice": {"tools": TOOLS}}
WRONG: dict[str, Any] = {
    "n": (0, 129, 1.5, True, "1"),
    "max_tokens": (-2, 64.5, "many"),
    "max_completion_tokens": (0, 1.5),
    "temperature": (-1, "hot", True, 1e400),
    "top_p": (0, 1.1),
    "top_k": (-2, 0.5),
    "min_p": (-0.1, 2),
    "seed": (2**64, 0.5, "x"),
    "stop": ({}, [1], [""]),
    "stop_token_ids": (5, [-1], ["a"], [9999]),
    "presence_penalty": (3,),
    "frequency_penalty": (-3,),
    "repetition_penalty": (0, 3),
    "logit_bias": ([], {"x": 1}, {"1": 101}, {"1": "a"}, {"99999": 1}),
    "structured_outputs": (
        *({"json": {}, "regex": "a"}, {"whitespace_pattern": " "}, {"disable_any_whitespace": False}),
        *({"regex": "("}, {"regex": ""}, {"regex": 1}, {"choice": []}, {"choice": [1]}, {"choice": "a"}),
    ),
    "tool_choice": (
        *("some", {"type": "function"}, {"type": "allowed_tools", "allowed_tools": {"mode": "none"}}),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ),
    "response_format": ({"type": "xml"}, {"type": "json_schema"}, "json"),
    "speculation_length": (-1, 99),
    "drafts": ("some", "head"),
    "receipt": ("yes", True),
    "prediction": ("a", {}, {"type": "text", "content": "a"}, {"type": "content", "content": 5}),
    "stream": ("yes", 1),
    "echo": (True,),
    "prompt": ([], 5, [[]], [["a"]], [99999]),
}


def base(path: str) -> dict[str, Any]:
    more = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    return {**more, "max_tokens": 4, "temperature": 0}


def path_of(name: str) -> str:
    return COMPLETIONS if name in PARSERS["completions"].keys() - PARSERS["chat"] else CHAT


@at_door()
async def test_every_field_of_the_table_is_served_or_refused_by_its_name(site: Site) -> None:
    assert {*PARSERS["chat"], *PARSERS["completions"]} - {"logprobs"} == set(SERVED)
    for name in SERVED:
        body = {**base(path_of(name)), **WITH.get(name, {}), name: SERVED[name]}
        answer = await site.post(path_of(name), body)
        assert answer.status_code == 200, (name, answer.text)
    for name, accepted in FIXED.items():
        error = await site.refused(CHAT, {**base(CHAT), name: ["another"]})
        assert error["param"] == name and f"only {json.dumps(accepted[0])}" in error["message"]
        for value in accepted:
            assert await site.chat(**{name: value})
    for label in ("user", "safety_identifier", "prompt_cache_key"):
        assert await site.chat(**{label: "x"}, temperature=0)


@at_door()
async def test_values_of_the_wrong_type_or_out_of_range_are_refused_by_the_name_of_the_field(site: Site) -> None:
    for name, values in WRONG.items():
        for value in values:
            path = COMPLETIONS if name in PARSERS["completions"] else CHAT
            body = json.dumps({**base(path), **WITH.get(name, {}), name: value})
            error = await site.refused(path, body.replace("Infinity", "1e400").encode())
            assert str(error["param"]).startswith(name), (name, value, error)


@pytest.mark.parametrize(
    ("path", "field", "meant"),
    [
        *((COMPLETIONS, "max_token", "did you mean max_tokens?"), (CHAT, "temprature", "did you mean temperature?")),
        *((CHAT, "prompt", ""), *((CHAT, name, f"use {other}") for name, other in INSTEAD.items())),
    ],
)
@at_door()
async def test_an_unknown_field_is_refused_with_a_hint(site: Site, path: str, field: str, meant: str) -> None:
    error = await site.refused(path, {**base(path), field: 1})
    assert error["param"] == field and meant in error["message"]


@at_door()
async def test_what_is_no_plain_json_is_refused(site: Site) -> None:
    hostile = {
        b"{": "not JSON",
        b"[]": "not a JSON object",
        b'{"prompt": "a", "prompt": "b"}': "given twice",
        b'{"temperature": NaN, "prompt": "a"}': "NaN",
        b'{"prompt": "\\ud800"}': "UTF-8",
        b'{"prompt": "\xff"}': "UTF-8",
        b'{"logit_bias": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}": "deeper",
        b'{"logit_bias": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "deeper",
        b'{"n": ' + b"1" * 5000 + b"}": "JSON",
    }
    for body, why in hostile.items():
        assert why in (await site.refused(COMPLETIONS, body))["message"]


@at_door()
async def test_whole_numbers_and_what_clients_send_for_no_limit_are_taken_as_they_are_meant(site: Site) -> None:
    plain = await site.text(max_tokens=8)
    assert await site.text(max_tokens=8.0, top_k=40.0, n=1.0, min_tokens=0.0, stop_token_ids=[257.0]) == plain
    for path, name in ((CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETIONS, "max_tokens")):
        ask = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
        answers = [(await site.post(path, {**ask, **limit, "temperature": 0})).json() for limit in ({}, {name: -1})]
        assert answers[0]["choices"] == answers[1]["choices"] and answers[1]["usage"]["completion_tokens"] > 9
    drawn = {await site.text(seed=-1, temperature=1, max_tokens=40) for _ in range(3)}
    assert len(drawn) > 1 and await site.text(seed=-2, temperature=1) == await site.text(seed=-2.0, temperature=1)
    assert "0 is outside" in (await site.refused(CHAT, {"messages": HELLO, "max_tokens": 0}))["message"]


async def changed(site: Site, **fields: Any) -> bool:
    plain = {"temperature": 1, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    return await site.text(**plain) != await site.text(**{**plain, **fields})


async def test_each_field_of_a_draw_changes_the_text() -> None:
    draws = [
        {"seed": 6},
        {"temperature": 0},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.9},
        {"logit_bias": {"65": 100}},
        {"max_tokens": 3},
        {"structured_outputs": {"regex": "[ab]{3}"}},
    ]
    async with door() as site:
        assert not await changed(site)
        assert [each for each in draws if not await changed(site, **each)] == []
        assert not await changed(site, drafts="none") and not await changed(site, speculation_length=1)
        assert not await changed(site, user="x", cache_salt="y")
    async with door(kind=ForgetfulRunner) as site:  # whose greedy output repeats itself
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            assert await site.text(max_tokens=60) != await site.text(max_tokens=60, **{name: 2}), name

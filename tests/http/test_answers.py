"""What OpenAI's client gets from the door: texts as over gRPC, choices, streams, log-probabilities, tools, usage."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tandem.engine.generator import RequestDefaults
from tandem.services.http.tool_calls import FORMATS, RequiredCalls
from tandem.speculation.types import SamplingParams
from tests.http.site import CHAT, COMPLETIONS, HELLO, Site, at_door, door
from tests.support import ForgetfulRunner, oracle

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7}
ADD = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "required": ["a", "b"]}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now", "parameters": NOTHING}},
]


def expected(prompt: str = "hello", count: int = 12, **sampling: Any) -> str:
    tokens = oracle(list(prompt.encode()), SamplingParams(**sampling), count)
    return bytes(token for token in tokens if token < 256).decode("latin-1")


async def streamed(site: Site, **body: Any) -> dict[int, str]:
    """The text of each choice of a stream, by index."""
    texts: dict[int, str] = {}
    stream = await site.client.completions.create(model="toy", prompt="hello", stream=True, **body)
    async for event in stream:
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {**SAMPLED, "top_p": 0.9}])
@at_door()
async def test_the_text_is_the_target_alones_streamed_and_not(site: Site, sampling: dict[str, Any]) -> None:
    wanted = expected(**sampling)
    whole = await site.client.completions.create(model="toy", prompt="hello", max_tokens=12, **sampling)
    assert whole.choices[0].text == wanted and whole.object == "text_completion"
    assert await streamed(site, max_tokens=12, **sampling) == {0: wanted}
    chat = await site.client.chat.completions.create(model="toy", messages=HELLO, max_tokens=12, **sampling)
    assert chat.choices[0].message.content == wanted and chat.choices[0].message.role == "assistant"


@at_door()
async def test_choice_i_draws_with_the_seed_plus_i_for_each_of_several_prompts(site: Site) -> None:
    body: Any = {"max_tokens": 8, "n": 3, **SAMPLED}
    wanted = {i: expected(count=8, temperature=0.9, seed=7 + i) for i in range(3)}
    whole = await site.client.completions.create(model="toy", prompt="hello", **body)
    assert {each.index: each.text for each in whole.choices} == wanted
    assert await streamed(site, **body) == wanted
    several = await site.client.completions.create(model="toy", prompt=["hello", "you"], **{**body, "n": 2})
    texts = [each.text for each in several.choices]
    assert texts[:2] == [wanted[0], wanted[1]]
    assert texts[2:] == [expected("you", 8, temperature=0.9, seed=7 + i) for i in range(2)]
    ids = await site.client.completions.create(model="toy", prompt=list(b"hello"), **body)
    assert ids.choices[2].text == wanted[2]
    assert several.usage and several.usage.prompt_tokens == 8
    last = await site.client.completions.create(
        model="toy", prompt="hello", max_tokens=8, n=2, temperature=0.9, seed=2**64 - 1
    )
    assert last.choices[1].text == expected(count=8, temperature=0.9, seed=0)


async def test_where_a_request_is_silent_the_servers_own_defaults_apply() -> None:
    given = dict.fromkeys(("temperature", "seed"), "the operator")
    own = RequestDefaults(SamplingParams(temperature=0.8, seed=11), 5, given)
    async with door(defaults=own) as site:
        answer = await site.client.completions.create(model="toy", prompt="hello")
        assert answer.choices[0].text == expected(count=5, temperature=0.8, seed=11)
        answer = await site.client.completions.create(model="toy", prompt="hello", temperature=0, max_tokens=8)
        assert answer.choices[0].text == expected(count=8)
    async with door() as site:  # without a seed, answers differ
        ask = {"model": "toy", "prompt": "hello", "max_tokens": 40}  # the temperature is 1, as OpenAI's
        texts = {(await site.client.completions.create(**ask)).choices[0].text for _ in range(3)}
        assert len(texts) > 1
        ones = await site.client.completions.create(**ask, seed=3)
        assert ones.choices[0].text == expected(count=40, temperature=1.0, seed=3)


@at_door(kind=ForgetfulRunner)
async def test_a_stop_string_ends_the_text_and_is_never_shown_in_part(site: Site) -> None:
    text = await site.text(max_tokens=40)
    stop = text[20:24]
    wanted = text[: text.index(stop)]
    assert await site.text(max_tokens=40, stop=stop) == wanted
    parts = await site.events(COMPLETIONS, {"prompt": "hello", "max_tokens": 40, "stop": [stop, "never"]})
    told = ""
    for part in parts:
        told += part["choices"][0]["text"]
        assert wanted.startswith(told)
    assert told == wanted and parts[-1]["choices"][0]["finish_reason"] == "stop"


@at_door()
async def test_log_probabilities_have_each_kinds_own_shape(site: Site) -> None:
    chat = await site.client.chat.completions.create(
        model="toy", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    told = chat.choices[0].logprobs
    assert told and told.content and len(told.content) == 6
    for each in told.content:
        assert len(each.top_logprobs) == 2 and each.top_logprobs[0].logprob == each.logprob
        assert each.bytes and bytes(each.bytes).decode(errors="replace") == each.token
    plain = await site.client.completions.create(model="toy", prompt="hello", max_tokens=6, temperature=0, logprobs=2)
    lists = plain.choices[0].logprobs
    assert lists and lists.token_logprobs == [each.logprob for each in told.content]
    assert lists.tokens and lists.text_offset and lists.top_logprobs
    assert len(lists.tokens) == len(lists.text_offset) == len(lists.top_logprobs) == 6
    events = await site.events(CHAT, {"messages": HELLO, "max_tokens": 6, "logprobs": True})
    parts = [one for each in events for one in (each["choices"][0]["logprobs"] or {}).get("content", ())]
    assert [each["logprob"] for each in parts] == lists.token_logprobs
    ids = (await site.completion(max_tokens=3, return_token_ids=True))["choices"][0]
    assert ids["prompt_token_ids"] == list(b"hello") and len(ids["token_ids"]) == 3


@at_door()
async def test_a_predicted_output_drafts_and_the_usage_counts_it_alone(site: Site) -> None:
    ask: Any = {"max_tokens": 60, "structured_outputs": {"regex": "[a-z]{60}"}}
    plain = await site.chat(**ask, drafts="none")
    text = plain["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}], "z" * 20):
        answer = await site.chat(**ask, prediction={"type": "content", "content": content})
        assert answer["choices"] == plain["choices"]
        accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        assert accepted > 0 if content is text else content != "z" * 20 or accepted == 0
    assert "zz" not in text
    events = await site.events(COMPLETIONS, {"prompt": "a", "max_tokens": 5, "prediction": {"content": "b"}})
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    error = await site.refused(CHAT, {"messages": HELLO, "drafts": "none", "prediction": {"content": "b"}})
    assert error["param"] == "prediction"


@at_door(drafts=True)
async def test_a_part_of_a_stream_has_its_tokens_and_how_they_divide_into_rounds(site: Site) -> None:
    ask = {"messages": HELLO, "max_tokens": 60, "return_token_ids": True, "stream_options": {"include_usage": True}}
    *events, last = await site.events(CHAT, ask)
    parts = [choice for each in events for choice in each["choices"] if "token_ids" in choice]
    assert all(sum(each["rounds"]) == len(each["token_ids"]) for each in parts)
    rounds = [count for each in parts for count in each["rounds"]]
    assert sum(rounds) == last["usage"]["completion_tokens"]
    accepted = last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert sum(count - 1 for count in rounds) == accepted > 0


@at_door()
async def test_what_ends_a_line_for_some_clients_ends_none_of_an_event(site: Site) -> None:
    text = "a\x85b"
    shown = text.encode().decode("latin-1")  # the toy's tokens are bytes
    body = {"prompt": "hello", "max_tokens": 40, "structured_outputs": {"choice": [text]}, "stream": True}
    answer = await site.post(COMPLETIONS, body)
    *told, done = [line for line in answer.text.splitlines() if line and line != ": "]
    events = [json.loads(line.removeprefix("data: ")) for line in told]
    assert "".join(each["choices"][0]["text"] for each in events) == shown and done == "data: [DONE]"


@at_door(drafts=True)
async def test_usage_counts_cached_accepted_and_rejected_tokens(site: Site) -> None:
    answer = await site.chat(max_tokens=30, temperature=0)
    usage = answer["usage"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0 and details["rejected_prediction_tokens"] >= 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    text = answer["choices"][0]["message"]["content"]
    for at in range(1, 20):  # what a stop cuts off a round was not accepted
        cut = (await site.chat(max_tokens=30, stop=[text[at : at + 2]]))["usage"]
        assert cut["completion_tokens_details"]["accepted_prediction_tokens"] <= cut["completion_tokens"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await site.events(CHAT, {"messages": HELLO, "max_tokens": 30, "stream_options": options})
    assert events[-1]["choices"] == [] and events[-1]["usage"] == usage
    counts = [each["usage"]["completion_tokens"] for each in events]
    assert counts == sorted(counts) and counts[-1] == usage["completion_tokens"]
    assert not any("usage" in each for each in await site.events(CHAT, {"messages": HELLO, "max_tokens": 3}))


@at_door()
async def test_the_output_has_the_structure_that_either_api_asks_for(site: Site) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "add", "strict": True, "schema": ADD}}
    for body in ({"response_format": named}, {"structured_outputs": {"json": ADD}}):
        said = await site.chat(max_tokens=60, temperature=1, **body)
        assert json.loads(said["choices"][0]["message"]["content"])["b"] == 3
    assert await site.text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert await site.text(structured_outputs={"grammar": 'start: "x" "y"'}) == "xy"
    twice = {"structured_outputs": {"regex": "a"}, "response_format": named, "prompt": "a"}
    assert (await site.refused(COMPLETIONS, twice))["param"] == "structured_outputs"


@at_door(length=2048)
async def test_a_schema_that_cannot_be_served_blocks_no_other_tool_and_is_named_with_the_place(site: Site) -> None:
    kids = {"type": "array", "items": {"$ref": "#"}, "maxItems": 0}
    tree = {"type": "object", "properties": {"v": {"const": 1}, "kids": kids}}
    odd = {"type": "object", "properties": {"x y": {"type": "sting"}}}
    again = {"$defs": {"T": {"const": 7}}, "properties": {"t": {"$ref": "#/$defs/T"}}, "required": ["t"]}
    other = {**again, "$defs": {"T": {"const": 8}}}  # another of the same name
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in {"tree": {**tree, "required": ["v", "kids"]}, "a": again, "b": other}.items()
    ]
    bad = {"type": "function", "function": {"name": "bad", "parameters": odd}}
    ask: Any = {"tools": [*tools, bad], "max_tokens": 200}
    wanted = {"tree": '{"v":1,"kids":[]}', "a": '{"t":7}', "b": '{"t":8}'}
    for name, arguments in wanted.items():
        named = await site.chat(tool_choice={"type": "function", "function": {"name": name}}, **ask)
        assert named["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    several = await site.chat(tool_choice="required", temperature=1, seed=5, **{**ask, "tools": tools})
    calls = [each["function"] for each in several["choices"][0]["message"]["tool_calls"]]
    assert len(calls) > 1 and all(each["arguments"] == wanted[each["name"]] for each in calls)
    for choice in ("required", {"type": "function", "function": {"name": "bad"}}):
        error = await site.refused(CHAT, {"messages": HELLO, "tool_choice": choice, **ask})
        assert error["param"] == "tools"
        assert "at #/$defs/tools.bad/properties/x%20y: Invalid type: sting" in error["message"]
    twice = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": twice}}
    error = await site.refused(CHAT, {"messages": HELLO, "response_format": form})
    assert "the output breaks it at $: " in error["message"] and error["param"] == "response_format"


@at_door()
async def test_a_tool_that_must_be_called_is_called_streamed_and_not(site: Site) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    asked: Any = {"model": "toy", "messages": HELLO, "tools": TOOLS, "max_tokens": 120, "seed": 3}
    for choice, names in ((named, {"add"}), ("required", {"add", "now"})):
        answer = await site.client.chat.completions.create(
            tool_choice=choice, parallel_tool_calls=False, temperature=1, **asked
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
        assert call.type == "function" and call.function.name in names
        if call.function.name == "add":
            assert json.loads(call.function.arguments)["b"] == 3
        async with site.client.chat.completions.stream(
            tool_choice=choice, parallel_tool_calls=False, temperature=1, **asked
        ) as stream:
            last = await stream.get_final_completion()
        (again,) = last.choices[0].message.tool_calls or ()
        assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    answer = await site.client.chat.completions.create(
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, temperature=1, **asked
    )
    assert {each.function.name for each in answer.choices[0].message.tool_calls or ()} == {"now"}
    with pytest.raises(openai.BadRequestError, match="tool_choice: no tool is a function named 'sub'"):
        await site.client.chat.completions.create(
            tool_choice={"type": "function", "function": {"name": "sub"}}, **asked
        )
    assert '"tools"' in str(await told_of(site, tools=TOOLS))
    assert '"tools"' not in str(await told_of(site, tools=TOOLS, tool_choice="none"))


async def told_of(site: Site, **body: Any) -> str:
    """The prompt that a chat becomes."""
    answer = await site.chat(max_tokens=1, return_token_ids=True, **body)
    return bytes(answer["prompt_token_ids"]).decode()


def test_a_list_of_calls_is_told_as_each_is_complete() -> None:
    parser = RequiredCalls(FORMATS["hermes"])
    assert parser.add('[{"name":"a","arguments":{"x":"}') == []
    (first,) = parser.add('"}},{"name":')
    (second,) = parser.add('"b","arguments":{}}]')
    assert [each["tool_calls"][0]["index"] for each in (first, second)] == [0, 1]
    assert first["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"x":"}"}'}
    assert parser.add(',{"name":"c","argu') == parser.end(cut=True) == []


SHOWN = """da
b<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call><tool_response>
4
</tool_response>"""
"""A history in the format for templates that have none for calls."""


@at_door()
async def test_messages_are_read_as_openai_writes_them_and_what_is_not_served_is_named(site: Site) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history: Any = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    assert await told_of(site, messages=history) == SHOWN
    wrong: list[tuple[Any, str]] = [
        ([], "messages"),
        ([{"role": "robot", "content": ""}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "a", "mood": "good"}], "messages[0].mood"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}], "messages[0]"),
    ]
    for messages, field in wrong:
        assert (await site.refused(CHAT, {"messages": messages}))["param"].startswith(field)
    for counts, said in (
        ([1, 129], "messages[1].tool_calls: 129 are above the limit of 128"),
        ([128] * 9, "messages: 1152 calls of tools are above the limit of 1024"),
        ([128] * 8, "messages[0].tool_calls[0]"),  # else they are counted before any is read
    ):
        unread = [{"role": "assistant", "tool_calls": [{"function": "no object"}] * count} for count in counts]
        assert (await site.refused(CHAT, {"messages": unread}))["message"].startswith(said)


@at_door(adapters={"sql": "1"})
async def test_the_other_paths_answer_as_vllms_do(site: Site) -> None:
    assert [each.id async for each in site.client.models.list()] == ["toy", "sql"]
    model = (await site.http.get("/v1/models/sql")).json()
    assert (model["parent"], model["max_model_len"]) == ("toy", 512)
    for path in ("/health", "/health/live", "/version", "/"):
        assert (await site.http.get(path)).status_code == 200, path
    site.health.set(2, "")
    assert (await site.http.get("/health")).status_code == 503
    assert (await site.http.get("/health/live")).status_code == 200
    assert "prometheus" in (await site.http.get("/metrics")).text
    lost = await site.http.post("/v1/chat/completion")
    assert lost.status_code == 404 and "/v1/chat/completions?" in lost.json()["error"]["message"]
    wrong = await site.http.get(COMPLETIONS)
    assert wrong.status_code == 405 and "POST" in wrong.json()["error"]["message"]
    assert "access-control-allow-origin" not in wrong.headers

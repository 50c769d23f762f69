"""The embedded pair at its HTTP port, as OpenAI's client and our own see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tandem import Client, SamplingParams, Structure, StructureKind
from tests.support import HANG, ServerProcess

pytestmark = pytest.mark.thorough
HELLO = [{"role": "user", "content": "hello"}]


def test_the_pair_says_at_its_own_port_for_http_what_it_says_by_grpc(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--role", "fused_target", "--port", "0", "--http_port", "0", "--batch", "2")
    try:
        address = server.wait_ready(5 * HANG)
        ready = json.loads(server.ready_file.read_text())
        url = f"http://127.0.0.1:{ready['http_port']}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=5 * HANG) as client:
            check(client, ready["model"], address)
    finally:
        server.process.kill()
        server.process.wait()


def check(client: openai.OpenAI, model: str, address: str) -> None:
    with Client(address) as ours:
        greedy = ours.generate("hello", chat=True, max_new_tokens=12).text
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=7)
        sampled = ours.generate("1, 2, 3,", max_new_tokens=12, sampling=sampling).text
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    chat = client.chat.completions.create(**asked)
    assert model == "SmolLM2-135M-Instruct" and chat.choices[0].message.content == greedy
    details = chat.usage.completion_tokens_details if chat.usage else None
    assert details and details.accepted_prediction_tokens is not None
    events = client.chat.completions.create(**asked, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == greedy
    again: Any = {"model": model, "prompt": "1, 2, 3,", "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    for _ in range(2):
        assert client.completions.create(**again).choices[0].text == sampled
    events = client.completions.create(**again, stream=True)
    assert "".join(event.choices[0].text for event in events if event.choices) == sampled
    check_turns(client, model)
    check_messages(client, model, address)
    check_features(client, model, address)
    check_json_ends(client, model)
    word = sampled.split()[2]
    stopped = client.completions.create(**again, stop=[word]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (sampled[: sampled.index(word)], "stop")


def check_turns(client: openai.OpenAI, model: str) -> None:
    """Later turns of a chat process neither what was asked before nor what was answered, but for a page at most."""
    messages: Any = []
    said = 0
    for question in ("What is a prime number?", "Name three of them, please.", "Is one of them even?"):
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0)
        assert reply.usage and reply.usage.prompt_tokens_details
        cached = reply.usage.prompt_tokens_details.cached_tokens or 0
        assert cached > said - 16 - 1, "all of the turns before, in whole pages"
        said = reply.usage.total_tokens
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


ORDER = {  # as pydantic writes it
    "$defs": {
        "Item": {
            "properties": {
                "title": {"maxLength": 15, "title": "Title", "type": "string"},
                "count": {"maximum": 99, "minimum": 0, "title": "Count", "type": "integer"},
            },
            "required": ["title", "count"],
            "title": "Item",
            "type": "object",
        }
    },
    "properties": {
        "items": {"items": {"$ref": "#/$defs/Item"}, "maxItems": 2, "title": "Items", "type": "array"},
        "paid": {"default": False, "title": "Paid", "type": "boolean"},
    },
    "required": ["items"],
    "title": "Order",
    "type": "object",
}


def check_json_ends(client: openai.OpenAI, model: str) -> None:
    """Bounded JSON ends, is valid, and has no properties but those that are named, whatever was asked."""
    for prompt in ("I would like two loaves of bread.", "Give an example.", "Is water wet?"):
        for temperature in (0, 1):
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=100,
                temperature=temperature,
                seed=1,
                response_format={"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER}},
            ).choices[0]
            assert answer.finish_reason == "stop" and answer.message.content
            order = json.loads(answer.message.content)
            jsonschema.validate(order, ORDER)
            assert order.keys() <= {"items", "paid"} and all(
                each.keys() == {"title", "count"} for each in order["items"]
            )


def check_messages(client: openai.OpenAI, model: str, address: str) -> None:
    """A chat of several turns gets by gRPC the tokens that it gets by HTTP, streamed or not, sampled too."""
    chat: Any = [
        {"role": "system", "content": "You are a pirate. Be brief."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "Arr, a pirate!"},
        {"role": "user", "content": "What do you drink, and why?"},
    ]
    asked: Any = {"model": model, "messages": chat, "max_tokens": 16, "seed": 3}
    with Client(address) as ours:
        for temperature in (0.0, 0.9):
            theirs = client.chat.completions.create(**asked, temperature=temperature)
            sampling = SamplingParams(temperature=temperature, seed=3)
            own = ours.generate(messages=chat, sampling=sampling, max_new_tokens=16)
            assert own.text == theirs.choices[0].message.content
            assert theirs.usage and own.prompt_tokens == theirs.usage.prompt_tokens
            assert (
                "".join(each.text for each in ours.stream(None, sampling, messages=chat, max_new_tokens=16)) == own.text
            )


def check_features(client: openai.OpenAI, model: str, address: str) -> None:
    """A JSON schema and log-probabilities: the same by HTTP, streamed or not, as by gRPC."""
    question = "Name a city in France and its population."
    structure = Structure(StructureKind.JSON_SCHEMA, json.dumps(CITY))
    with Client(address) as ours:
        expected = ours.generate(
            question, chat=True, max_new_tokens=60, sampling=SamplingParams(structure=structure), logprobs=2
        )
    asked: Any = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 60,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.message.content == expected.text and choice.finish_reason == "stop"
    jsonschema.validate(json.loads(expected.text), CITY)
    assert choice.logprobs and choice.logprobs.content
    told = [(each.logprob, [top.logprob for top in each.top_logprobs]) for each in choice.logprobs.content]
    for (logprob, top), own in zip(told, expected.logprobs, strict=False):
        assert logprob == pytest.approx(own.logprob, abs=1e-5)
        assert top == pytest.approx([value for _, value in own.top], abs=1e-5)
    assert len(expected.logprobs) - 1 <= len(told) <= len(expected.logprobs)
    events = [event.choices[0] for event in client.chat.completions.create(**asked, stream=True) if event.choices]
    assert "".join(event.delta.content or "" for event in events) == expected.text
    streamed = [each for event in events if event.logprobs for each in event.logprobs.content or ()]
    assert [each.logprob for each in streamed][: len(told)] == [logprob for logprob, _ in told]

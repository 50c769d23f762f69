"""OpenAI clients, unmodified, through the real gateway to a toy server: text, streams, usage, refusals, leaving."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.runners.toy import ToyTokenizer
from tandem.speculation.types import SamplingParams, Structure, StructureKind
from tandem.workshops.gateway.front import PASSED
from tests.hostile_grammars import PATTERNS, SLOW
from tests.http.test_fields import SERVED
from tests.openai.gateway import CHAT, COMPLETIONS, HELLO, NEEDS_CURL, Gateway, gateway
from tests.openai.test_gateway_front import asking
from tests.services.test_sampling_features import PROMPT, reference
from tests.support import HANG, ServerProcess, oracle, server_process

pytestmark = pytest.mark.thorough
TEXT = b"hello"
TOY = ("--backend", "toy", "--batch", "2", "--sequence_length", "400")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = (
        "--model",
        "step=0.005",
        "--draft_model",
        "miss=0.3",
        "--queue",
        "1",
        "--engine_port",
        "0",
        "--speculation_length",
        "3",
    )
    with server_process(folder, "--role", "fused_target", *TOY, *flags) as process:
        yield process


@pytest.fixture(scope="module")
def gate(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    port = json.loads(server.ready_file.read_text())["engine_port"]
    with gateway(tmp_path_factory.mktemp("gateway"), "--workers", f"127.0.0.1:{port}", "--queue", "0") as running:
        yield running


@pytest.fixture(scope="module")
def client(gate: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gate.url, api_key="none", max_retries=0, timeout=HANG) as client:
        yield client


def shown(tokens: tuple[int, ...]) -> str:
    """What the gateway makes of token ids: UTF-8, without what is special."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def readable(count: int, **sampling: Any) -> tuple[int, str]:
    """A seed whose first tokens are plain text, whose text therefore does not depend on who decodes, and that text."""
    for seed in range(100_000):
        tokens = oracle(TEXT, SamplingParams(seed=seed, **sampling), count)
        if all(32 <= token < 127 for token in tokens) and len(tokens) == count:
            return seed, shown(tokens)
    raise AssertionError("no such seed")


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]


@pytest.mark.parametrize("more", [{}, {"top_k": 30, "min_p": 0.02}])
def test_chat_and_completions_streamed_or_not_give_the_text_that_the_target_alone_would(
    client: openai.OpenAI, more: dict[str, float]
) -> None:
    seed, text = readable(4, temperature=0.8, top_p=0.9, **more)
    asked: Any = {"model": "toy", "max_tokens": 4, "seed": seed, "temperature": 0.8, "top_p": 0.9, "extra_body": more}
    chat = client.chat.completions.create(messages=HELLO, **asked)  # type: ignore[arg-type]
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (text, "length")
    plain = client.completions.create(prompt="hello", **asked)
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == (text, "length")
    streamed = client.chat.completions.create(messages=HELLO, stream=True, **asked)  # type: ignore[arg-type]
    assert "".join(event.choices[0].delta.content or "" for event in streamed if event.choices) == text
    events = client.completions.create(prompt="hello", stream=True, **asked)
    assert "".join(event.choices[0].text for event in events if event.choices) == text


def test_usage_counts_tokens_and_what_became_of_drafts(client: openai.OpenAI) -> None:
    asked: Any = {"model": "toy", "max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
    usage = client.chat.completions.create(messages=HELLO, **asked).usage  # type: ignore[arg-type]
    assert usage and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 60, 65)
    details = usage.completion_tokens_details
    assert details and details.accepted_prediction_tokens and details.rejected_prediction_tokens
    events = client.chat.completions.create(
        messages=HELLO,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        **asked,
    )
    (last,) = [event.usage for event in events if event.usage]
    assert last.completion_tokens == 60 and last.completion_tokens_details
    assert last.completion_tokens_details.accepted_prediction_tokens


def test_usage_says_how_much_of_a_prompt_was_cached(client: openai.OpenAI) -> None:
    prompt = "two pages of sixteen tokens, and some more."
    asked: Any = {"model": "toy", "max_tokens": 2, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answers = [client.completions.create(prompt=prompt, **asked) for _ in range(2)]
    details = [answer.usage and answer.usage.prompt_tokens_details for answer in answers]
    assert [each.cached_tokens if each else 0 for each in details] == [0, 32]
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_each_turn_of_a_chat_begins_with_the_answers_before(client: openai.OpenAI) -> None:
    """Whole pages of 16 tokens; what the last round drew last was not processed. Toy text is a token a character."""
    messages, found = [], []
    for question in ("what is a page of a cache? ", "and why is it kept? ", "for how long, please? "):
        messages.append({"role": "user", "content": question})
        asked: Any = {"model": "toy", "messages": messages, "max_tokens": 70, "temperature": 0}
        reply = client.chat.completions.create(**asked, extra_body={"regex": "[a-z ]{70,}"})
        assert reply.usage and reply.choices[0].message.content
        details = reply.usage.prompt_tokens_details
        found.append((reply.usage.prompt_tokens, details.cached_tokens if details else None))
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    known = [0, *(prompt + 70 - 1 for prompt, _ in found[:2])]
    assert [cached or 0 for _, cached in found] == [tokens // 16 * 16 for tokens in known]


def test_choices_draw_with_seeds_of_their_own(client: openai.OpenAI) -> None:
    asked: Any = {"model": "toy", "max_tokens": 12}
    three = client.chat.completions.create(messages=HELLO, seed=5, n=3, **asked)  # type: ignore[arg-type]
    alone = [
        client.chat.completions.create(messages=HELLO, seed=5 + i, **asked)  # type: ignore[arg-type]
        for i in range(3)
    ]
    assert [c.message.content for c in three.choices] == [each.choices[0].message.content for each in alone]
    assert len({c.message.content for c in three.choices}) == 3
    said = {0: "", 1: "", 2: ""}
    for event in client.chat.completions.create(messages=HELLO, seed=5, n=3, stream=True, **asked):  # type: ignore[arg-type]
        for choice in event.choices:
            said[choice.index] += choice.delta.content or ""
    assert list(said.values()) == [c.message.content for c in three.choices]


def test_without_a_seed_each_request_is_drawn_anew_and_with_one_it_repeats(client: openai.OpenAI) -> None:
    def text(**more: Any) -> str | None:
        asked: Any = {"model": "toy", "max_tokens": 24, "messages": HELLO, **more}
        return client.chat.completions.create(**asked).choices[0].message.content  # type: ignore[no-any-return]

    assert text(seed=9) == text(seed=9) != text(seed=10)
    assert text() != text()


def test_choice_i_is_the_answer_to_the_seed_plus_i_whichever_ends_first(client: openai.OpenAI) -> None:
    asked: Any = {"model": "toy", "messages": HELLO, "max_tokens": 40, "temperature": 2.0}
    alone = [client.chat.completions.create(**asked, seed=seed).choices[0] for seed in range(22)]
    for seed in range(20):
        three = client.chat.completions.create(**asked, seed=seed, n=3).choices
        said = {0: "", 1: "", 2: ""}
        for event in client.chat.completions.create(**asked, seed=seed, n=3, stream=True):
            for choice in event.choices:
                said[choice.index] += choice.delta.content or ""
        expected = [each.message.content for each in alone[seed : seed + 3]]
        assert [each.message.content for each in three] == expected == list(said.values())
        assert [each.finish_reason for each in three] == [each.finish_reason for each in alone[seed : seed + 3]]


def test_stop_strings_and_ids_end_the_text_before_them(client: openai.OpenAI) -> None:
    seed, text = readable(6, temperature=1.0)
    asked: Any = {"model": "toy", "max_tokens": 6, "seed": seed}
    for more in ({"stop": text[3:5]}, {"stop": ["zzz", text[3]]}, {"extra_body": {"stop_token_ids": [ord(text[3])]}}):
        chat = client.chat.completions.create(messages=HELLO, **asked, **more).choices[0]  # type: ignore[arg-type]
        cut = min(text.find(text[3:5]), text.find(text[3])) if "stop" in more else text.find(text[3])
        assert (chat.message.content, chat.finish_reason) == (text[:cut], "stop")


def formatted(schema: str) -> dict[str, Any]:
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": json.loads(schema), "strict": True}}
    return {"response_format": format}


@pytest.mark.parametrize(
    ("path", "named", "body"),
    [
        (CHAT, "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        (CHAT, "presence_penalty", {"presence_penalty": 2.5}),
        (CHAT, "structure", {"regex": "("}),
        (CHAT, "structure: the json_schema cannot be enforced: no output can match it", formatted('{"$ref": "#"}')),
        (CHAT, "repetition_penalty: ", {"repetition_penalty": 1e-40}),
        (COMPLETIONS, "min_tokens", {"min_tokens": 2}),
        (CHAT, "temperature", {"temperature": -1}),
        (CHAT, "sequence length", {"max_tokens": 5000}),
    ],
)
def test_what_is_wrong_or_not_served_is_a_400_that_names_it(gate: Gateway, path: str, named: str, body: Any) -> None:
    reply = gate.post(path, **body, **({"prompt": "hello"} if path == COMPLETIONS else {}))
    assert reply.status == 400 and named in reply.json["error"]["message"], reply


def test_every_field_that_the_front_passes_on_is_answered_and_no_other(gate: Gateway) -> None:
    wrong = []
    for name in SERVED:
        of, body = asking(name)
        reply = gate.send(CHAT if of == "chat" else COMPLETIONS, body)
        if reply.status != (200 if name in PASSED else 400):
            wrong.append((name, reply))
        assert name in PASSED or reply.json["error"]["param"] == name
    assert wrong == []


@pytest.mark.parametrize("body", [formatted(PATTERNS.text), {"ebnf": SLOW.text}], ids=["schema", "grammar"])
def test_a_structure_that_costs_too_much_is_a_400_that_names_the_limit(gate: Gateway, body: dict[str, Any]) -> None:
    reply = gate.post(**body)
    limit = r"structure: the \w+ cannot be enforced: it (took more than 2 s of processor time|needed more than 256 MiB)"
    assert reply.status == 400 and re.search(limit, reply.json["error"]["message"]), reply


def test_penalties_structures_and_log_probabilities_are_those_of_plain_decoding(client: openai.OpenAI) -> None:
    penalties: Any = {"presence_penalty": 1.5, "frequency_penalty": 0.75}
    shape = Structure(StructureKind.REGEX, "[a-f]{2}[0-9]{3,5}x")
    for fields, sampling in (
        (
            {**penalties, "extra_body": {"repetition_penalty": 1.25}},
            SamplingParams(**penalties, repetition_penalty=1.25),
        ),
        ({"extra_body": {"regex": shape.text}}, SamplingParams(structure=shape)),
    ):
        tokens, logprobs = reference(sampling, 12)
        asked: Any = {"model": "toy", "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3, **fields}
        message: Any = [{"role": "user", "content": PROMPT.decode()}]
        choice = client.chat.completions.create(messages=message, **asked).choices[0]
        assert choice.message.content == shown(tokens)
        assert choice.logprobs and choice.logprobs.content
        told = [(each.logprob, [top.logprob for top in each.top_logprobs]) for each in choice.logprobs.content]
        assert told == [
            (pytest.approx(each.logprob, abs=1e-6), pytest.approx([value for _, value in each.top], abs=1e-6))
            for each in logprobs[: len(told)]
        ]
        assert len(told) in (len(tokens), len(tokens) - 1)  # smg leaves the end of sequence out


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)  # type: ignore[arg-type]


def test_a_client_that_leaves_frees_its_slot(gate: Gateway, server: ServerProcess) -> None:
    before = server.log.read_text().count("abort")
    for _ in range(3):  # more than there are slots
        gate.begin(max_tokens=390).leave()
    give_up = time.monotonic() + HANG
    while server.log.read_text().count("OK, abort") < before + 3:
        assert time.monotonic() < give_up, server.log.read_text()
        time.sleep(0.02)
    assert gate.post(max_tokens=4).status == 200


def test_a_full_server_is_a_429_with_the_time_to_wait(gate: Gateway, client: openai.OpenAI) -> None:
    give_up, refused = time.monotonic() + HANG, None
    while refused is None or refused.status == 200:  # what keeps it busy may have ended before the next is asked
        assert time.monotonic() < give_up
        busy = [gate.begin(max_tokens=390) for _ in range(2)]
        refused = gate.post(max_tokens=1)
        for stream in busy:
            stream.leave()
    assert refused.status == 429 and int(refused.headers["retry-after"]) > 0
    said = json.loads(refused.body)["error"]["message"]
    assert re.fullmatch(r"(\d+) requests are under way: \d+ slots of the workers and a queue of \d+ \(--queue\)", said)
    while (reply := gate.post(max_tokens=1)).status == 429:  # the gateway learns in its own time that they left
        assert time.monotonic() < give_up
        time.sleep(min(1, int(reply.headers["retry-after"])))
    assert reply.status == 200


@NEEDS_CURL
def test_curl_gets_text_and_events(gate: Gateway) -> None:
    seed, text = readable(4, temperature=1.0)
    for path, prompt in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "hello"})):
        for stream in (False, True):
            body = json.dumps({"model": "toy", "max_tokens": 4, "seed": seed, "stream": stream, **prompt})
            line = ["curl", "-s", "-N", "-m", "60", f"{gate.url}/{path}", "-H", "content-type: application/json"]
            said = subprocess.run([*line, "-d", body], capture_output=True, text=True, check=True).stdout
            if not stream:
                choice = json.loads(said)["choices"][0]
                assert (choice["message"]["content"] if "message" in choice else choice["text"]) == text
                continue
            events = [event.removeprefix("data: ") for event in said.split("\n\n") if event]
            assert events.pop() == "[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events]
            assert "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices) == text


def test_the_request_id_that_a_client_is_told_is_in_the_server_s_log(gate: Gateway, server: ServerProcess) -> None:
    told = gate.post(max_tokens=2).headers["x-request-id"]
    assert told in server.log.read_text()


def test_the_toy_tokenizer_is_the_bytes() -> None:
    assert ToyTokenizer().encode("hello", chat=True) == list(TEXT)


def test_a_stopping_server_finishes_what_runs_and_refuses_the_rest_with_503(tmp_path: Path) -> None:
    flags = ("--role", "fused_target", "--engine_port", "0", "--sequence_length", "400", "--model", "step=0.02")
    with server_process(tmp_path, *flags) as server:
        port = json.loads(server.ready_file.read_text())["engine_port"]
        _stopped(tmp_path, f"127.0.0.1:{port}", server)


def _stopped(folder: Path, worker: str, server: ServerProcess) -> None:
    with gateway(folder, "--workers", worker) as gate:
        running = gate.begin(max_tokens=100)
        server.process.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + HANG
        while (refused := gate.post(max_tokens=1)).status == 200:
            assert time.monotonic() < give_up
        assert refused.status == 503, refused
        events = running.rest().split("\n\n")
        assert "data: [DONE]" in events and '"finish_reason":"length"' in "".join(events)
        assert server.process.wait(HANG) == 0

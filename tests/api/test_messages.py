"""`messages=` over gRPC: the server's own template, and what the HTTP port says to the same chat."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.clients.messages import read_chat
from tandem.clients.terminal import ClientConfig, run_client
from tandem.rpc.channel import FUSED
from tandem.services.generation import GeneratingService
from tandem.speculation.types import GenerationRequest
from tandem.v1.fused_speculative_server_pb2_grpc import add_FusedSpeculativeServerServicer_to_server
from tests.http.site import door
from tests.support import listening, run, target_site
from tests.toy import ToyTokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hello"}],
    "several turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Who are you?", "name": "Ada"},
    ],
    "a developer": [{"role": "developer", "content": "Rhyme."}, {"role": "user", "content": "é\n"}],
    "a tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ],
}


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
async def test_a_chat_by_grpc_gets_the_tokens_that_it_gets_by_http(
    chat: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template shows all that it is given, so that a message told otherwise would change prompt and tokens."""
    shown: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def render(tokenizer: ToyTokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
        shown.append((messages, options))
        return json.dumps([messages, options])[:90]  # of some 100 tokens that the toys take

    monkeypatch.setattr(ToyTokenizer, "render", render)
    async with door() as site:
        service = GeneratingService(FUSED, site.generate.generator.info, site.generate)
        register = partial(add_FusedSpeculativeServerServicer_to_server, service)
        async with listening(register) as address, tandem.AsyncClient(address) as client:
            by_http = await site.chat(messages=chat, return_token_ids=True, logprobs=True, max_tokens=9)
            by_http, by_grpc = by_http, await client.generate(messages=chat, max_new_tokens=9)
    (http, grpc) = shown
    assert json.dumps(http) == json.dumps(grpc), "in the same order too, since templates may print them"
    assert tuple(by_http["choices"][0]["token_ids"]) == by_grpc.token_ids
    assert by_http["usage"]["prompt_tokens"] == by_grpc.prompt_tokens


@pytest.mark.parametrize(
    ("chat", "kind", "said"),
    [
        ([], ValueError, "messages: empty: at least one message is needed"),
        ("Hello", TypeError, 'messages must be a list of dictionaries with "role" and "content", or None'),
        (["Hello"], TypeError, "messages must be a list of dictionaries"),
        ([{"content": "x"}], ValueError, "messages[0].role: missing"),
        ([{"role": "user"}], ValueError, "messages[0].content: missing"),
        ([{"role": "user", "content": 7}], TypeError, "messages[0].content must be a string, not 7"),
        ([{"role": "bot", "content": "x"}], ValueError, "messages[0].role: 'bot' is not one of system, developer"),
        ([{"role": "user", "content": "x", "contents": "y"}], ValueError, "messages[0].contents: is not served"),
        ([{"role": "user", "content": "x", "tool_call_id": "a"}], ValueError, "[0].tool_call_id: of the role user"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], ValueError, "[0].tool_calls: of the role user"),
        ([{"role": "assistant", "tool_calls": [{}]}], TypeError, "messages[0].tool_calls[0] must be a dictionary with"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            ValueError,
            "messages[0].tool_calls[0]: the arguments of a call are not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}]}],
            ValueError,
            "messages[0].tool_calls[0]: the arguments of a call are not JSON",
        ),
        ([{"role": "user", "content": "\ud800"}], ValueError, "messages[0].content: has a lone surrogate"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 70 + "]" * 70}}]}],
            ValueError,
            "nested deeper than 64 levels",
        ),
    ],
)
def test_a_wrong_message_is_named_before_any_call(chat: Any, kind: type[Exception], said: str) -> None:
    with tandem.Client("127.0.0.1:1") as client:
        for method in (client.generate, client.stream):
            with pytest.raises(tandem.TandemError) as told:
                method(messages=chat)
            assert isinstance(told.value, kind) and said in str(told.value)
            assert told.value.field.startswith("messages") and told.value.code == "INVALID_ARGUMENT"


def test_a_chat_stands_in_place_of_a_prompt_and_is_one_without_the_option() -> None:
    chat = CHATS["one turn"]
    with tandem.Client("127.0.0.1:1") as client:
        with pytest.raises(tandem.TandemError, match="prompt: give exactly one of text, token_ids and messages"):
            client.generate("Hello", messages=chat)
        with pytest.raises(tandem.TandemError, match="prompt: give exactly one of text, token_ids and messages"):
            client.generate()
        with pytest.raises(tandem.TandemError, match="chat: is for a text; messages are a chat without it"):
            client.generate(messages=chat, chat=True)


async def test_what_a_template_refuses_is_told_with_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*_: Any, **__: Any) -> str:
        raise ValueError("the model's chat template refuses them: no system message, please")

    monkeypatch.setattr(ToyTokenizer, "render", render)
    async with target_site() as site, tandem.AsyncClient(site.address) as client:
        with pytest.raises(tandem.TandemError, match="messages: the model's chat template refuses") as told:
            await client.generate(messages=CHATS["several turns"])
        assert (told.value.code, told.value.field) == ("INVALID_ARGUMENT", "messages")


# --- at a terminal ---


def test_a_file_of_messages_is_asked_at_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(CHATS["one turn"]))

    async def test() -> tandem.Completion:
        async with target_site() as site, tandem.AsyncClient(site.address) as client:
            request = GenerationRequest(messages=read_chat(str(file)), max_new_tokens=8)
            assert await run_client(ClientConfig(site.address, ("",), request), None) == 0
            return await client.generate(messages=CHATS["one turn"], max_new_tokens=8)

    assert run(test()).text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        (b"\xff", "is not UTF-8 text"),
        (b"[", "is not JSON"),
        (b"{}", "is not a JSON list, as [{"),
        (b"[" * 10_000, "is nested too deeply"),
        (b"[7]", "messages[0] must be a dictionary"),
        (b"[" + b" " * 16 * 1024 * 1024 + b"]", "has more than 16777216 bytes"),
    ],
)
def test_a_file_that_is_no_chat_is_one_line(text: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ValueError, match="messages") as told:
        read_chat(str(file))
    assert said in str(told.value) and "\n" not in str(told.value)

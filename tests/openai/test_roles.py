"""Every server role at its HTTP port: the same request gives the same tokens, usage and log-probabilities."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support import HANG, ServerProcess, server_process

pytestmark = pytest.mark.thorough
TOY = ("--batch", "2", "--sequence_length", "200")
HELLO = [{"role": "user", "content": "hello"}]
DOOR = ("--http_port", "0")
DRAFT = ("--draft_model", "miss=0.3")
LENGTH = ("--speculation_length", "3")  # the toy's steps are too fast for drafts to pay
WAITING = ("--pipeline", "off")  # likewise: to a target that does not wait they may all come late


def answers(server: ServerProcess) -> list[Any]:
    """Text and log-probabilities, greedy and drawn, and whether drafts were counted."""
    port = json.loads(server.ready_file.read_text())["http_port"]
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=HANG) as client:
        asked: Any = {"model": "toy", "messages": HELLO, "max_tokens": 40, "logprobs": True, "top_logprobs": 2}
        asked["extra_body"] = {"ignore_eos": True}
        found: list[Any] = []
        for more in ({"temperature": 0}, {"temperature": 0.8, "seed": 11, "presence_penalty": 0.5}):
            answer = client.chat.completions.create(**asked, **more)
            choice = answer.choices[0]
            assert choice.logprobs and choice.logprobs.content and answer.usage
            told = [(each.token, each.logprob) for each in choice.logprobs.content]
            found.append((choice.message.content, told, answer.usage.completion_tokens))
        details = answer.usage.completion_tokens_details
        found.append(bool(details and details.accepted_prediction_tokens))
        return found


def test_every_role_gives_the_tokens_of_plain_decoding_over_http(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def start(name: str, *flags: str) -> ServerProcess:
            return stack.enter_context(server_process(tmp_path, *flags, ready_file=f"{name}.json"))

        plain = start("plain", "--role", "target", *TOY, *DOOR)
        draft = start("draft", "--role", "draft_worker", "--propose_only", *DRAFT, *TOY)
        verifier, drafter = f"127.0.0.1:{plain.port}", f"127.0.0.1:{draft.port}"
        servers = {
            "plain": plain,
            "remote draft": start(
                "remote", "--role", "target", "--draft_host", drafter, *LENGTH, *WAITING, *TOY, *DOOR
            ),
            "distributed": start(
                "distributed",
                *("--role", "draft_worker", "--target_host", verifier, *DRAFT, *LENGTH, *WAITING, *TOY, *DOOR),
            ),
            "fused": start("fused", "--role", "fused_target", *DRAFT, *LENGTH, *TOY, *DOOR),
        }
        found = {name: answers(server) for name, server in servers.items()}
    for name, (greedy, drawn, drafted) in found.items():
        assert [greedy, drawn] == found["plain"][:2], name
        assert drafted == (name != "plain"), name

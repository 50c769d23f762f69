"""A server's request flags hold for requests that do not say, and for no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.rpc.generation_client import GenerationClient
from tandem.speculation.types import SAMPLING_FIELDS, GenerationEnd, GenerationRequest, SamplingParams
from tests.daily import daily
from tests.support import GREEDY, ServerProcess, oracle, run, run_client, server_process

SERVICES = {"target": "TargetVerifier", "fused_target": "FusedSpeculativeServer", "draft_worker": "DraftWorker"}
EVERYTHING = frozenset(SAMPLING_FIELDS)
DEFAULTS = SamplingParams(temperature=0.9, top_p=0.95, seed=7)
FLAGS = ("--temperature", "0.9", "--top-p", "0.95", "--seed", "7", "--max_new_tokens", "12", "--sequence_length", "64")
PROMPT = tuple(b"what is not said")
ASKED = GenerationRequest(token_ids=PROMPT, ignore_end_of_sequence=True, unset_sampling=EVERYTHING)
SAYS = replace(ASKED, sampling=replace(DEFAULTS, seed=3), unset_sampling=EVERYTHING - {"seed"})


async def tokens(server: ServerProcess, service: str, *requests: GenerationRequest) -> list[tuple[int, ...]]:
    found = []
    async with GenerationClient.connect(f"127.0.0.1:{server.port}", service) as client:
        for request in requests:
            said: list[int] = []
            async for event in client.generate(request):
                said += () if isinstance(event, GenerationEnd) else event.token_ids
            found.append(tuple(said))
    return found


def expected(sampling: SamplingParams, count: int) -> tuple[int, ...]:
    return oracle(PROMPT, sampling, count, past_the_end=True)


@pytest.mark.parametrize("role", daily(SERVICES, 1))
def test_what_a_request_does_not_say_is_the_servers_and_what_it_says_its_own(role: str, tmp_path: Path) -> None:
    """Explicit zeros are said: greedy stays greedy, also where the target behind a draft worker samples."""
    service = SERVICES[role]
    long = replace(ASKED, sampling=GREEDY, unset_sampling=frozenset(), max_new_tokens=20)
    near = replace(
        ASKED, token_ids=PROMPT * 3 + PROMPT[:10], unset_sampling=frozenset()
    )  # 6 tokens of room, 12 by default
    with server_process(
        tmp_path, "--role", "target", "--sequence_length", "64", "--temperature", "0.5", ready_file="target.json"
    ) as behind:
        more = {"draft_worker": ("--target_port", str(behind.port)), "fused_target": ("--draft_model", "miss=0.3")}
        with server_process(tmp_path, "--role", role, *FLAGS, *more.get(role, ())) as server:
            said = run(tokens(server, service, ASKED, SAYS, long, near))
    assert said[0] == expected(DEFAULTS, 12)
    assert said[1] == expected(replace(DEFAULTS, seed=3), 12)
    assert said[2] == expected(GREEDY, 20)
    assert len(said[3]) == 64 - len(PROMPT * 3 + PROMPT[:10])


def test_the_client_role_sends_what_its_user_said(tmp_path: Path) -> None:
    with server_process(tmp_path, "--role", "target", *FLAGS) as server:
        ask = ("--port", str(server.port), "--prompt", PROMPT_TEXT, "--ignore_eos")
        silent, greedy = run_client(tmp_path, *ask), run_client(tmp_path, *ask, "--temperature", "0")
    assert "12 tokens in" in silent.stderr and "12 tokens in" in greedy.stderr
    assert silent.stdout == text(expected(DEFAULTS, 12)) and greedy.stdout == text(expected(GREEDY, 12))


PROMPT_TEXT = bytes(PROMPT).decode()


def text(said: tuple[int, ...]) -> str:
    return "".join(bytes([token]).decode("latin-1") for token in said if token < 256) + "\n"

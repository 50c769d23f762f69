"""What a client prints, and what it reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tandem.clients.async_client import AsyncClient
from tandem.clients.terminal import MAX_AT_ONCE, ClientConfig, run_prompts
from tandem.engine.batcher import DeviceLost
from tandem.rpc.channel import TARGET
from tandem.rpc.first_contact import service_at
from tandem.rpc.received_errors import TandemError
from tandem.runners.protocol import RowFailed
from tandem.speculation.types import Chunk, FinishReason, GenerationEnd, GenerationRequest, SpeculationStats
from tests.support import fused_site, listening, target_site, worker_site

ASK = GenerationRequest(text="")


async def spoken(request: GenerationRequest) -> AsyncGenerator[Chunk | GenerationEnd, None]:
    """Says the prompt's words, one token each, in two chunks."""
    words = (request.text or "").split()
    for part in (words[:1], words[1:]):
        yield Chunk(tuple(range(len(part))), "".join(f"{word} " for word in part))
        await asyncio.sleep(0)
    stats = SpeculationStats(rounds=2, drafted=4, accepted=1)
    yield GenerationEnd(FinishReason.STOP_STRING, 1, len(words), stats)


def show(*prompts: str, generate: Any = spoken, **options: Any) -> int:
    return asyncio.run(run_prompts(ClientConfig("nowhere", prompts, ASK, **options), generate, "test"))


def test_one_prompt_is_printed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("hello big world") == 0
    out, err = capsys.readouterr()
    assert out == "hello big world \n"
    assert "3 tokens in" in err and "2 rounds, 1 of 4 draft tokens accepted (25.0 %)" in err
    assert "ended by stop string" in err


def test_several_prompts_are_told_apart_and_shown_whole_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("one two", "three") == 0
    out, err = capsys.readouterr()
    lines, _, final = out.partition("\n=== Final outputs ===\n")
    assert sorted(lines.splitlines()) == ["[0] one two ", "[1] three "]
    assert final == "[Prompt 0 output]:\none two \n\n[Prompt 1 output]:\nthree \n\n"
    assert "[prompt 0]" in err and "[prompt 1]" in err


def test_lines_within_an_output_keep_their_prompts_number(capsys: pytest.CaptureFixture[str]) -> None:
    async def lines(request: GenerationRequest) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        yield Chunk((1, 2), "first\nsec")
        yield Chunk((3,), "ond\n")
        yield GenerationEnd(FinishReason.LENGTH, 1, 3, SpeculationStats())

    assert show("a", "b", generate=lines) == 0
    shown = capsys.readouterr().out.splitlines()
    for i in (0, 1):
        assert f"[{i}] first" in shown and f"[{i}] second" in shown


def test_token_by_token_each_token_has_a_line_and_the_text_follows(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("hello big world", token_text="<{}>".format) == 0
    out = capsys.readouterr().out
    assert out == "token 0: '<0>'\ntoken 0: '<0>'\ntoken 1: '<1>'\n\n\nhello big world \n"


def test_quiet_answers_come_alone_and_json_is_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("hello big world", quiet=True) == 0
    assert capsys.readouterr() == ("hello big world \n", "")
    assert show("one two", "three", quiet=True, json=True) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["prompt"], each["text"], each["tokens"]) for each in printed] == [
        (0, "one two ", 2),
        (1, "three ", 1),
    ]
    assert printed[0]["finish_reason"] == "stop_string" and printed[0]["error"] is None


@pytest.mark.parametrize("error", [TandemError("UNAVAILABLE", "gone"), RowFailed("nan"), DeviceLost("no device")])
def test_a_prompt_that_fails_is_a_line_and_the_others_go_on(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(request: GenerationRequest) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        if request.text == "bad":
            raise error
        async for event in spoken(request):
            yield event

    assert show("bad", "good one", generate=fails) == 1
    out, err = capsys.readouterr()
    assert f"failed: {error}" in err
    assert f"[Prompt 0 output]:\nfailed: {error}\n" in out
    assert "[Prompt 1 output]:\ngood one \n" in out


def test_a_stream_without_a_completion_is_a_failure_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    async def ends(request: GenerationRequest) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        yield Chunk((1,), "x")

    assert show("a", generate=ends) == 1
    assert "without a completion" in capsys.readouterr().err


def test_prompts_run_at_once_but_not_without_limit(capsys: pytest.CaptureFixture[str]) -> None:
    under_way, most = 0, 0

    async def counted(request: GenerationRequest) -> AsyncGenerator[Chunk | GenerationEnd, None]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        async for event in spoken(request):
            yield event
        under_way -= 1

    assert show(*(f"p{i}" for i in range(3 * MAX_AT_ONCE)), generate=counted) == 0
    assert most == MAX_AT_ONCE
    assert capsys.readouterr().out.count("output]:\n") == 3 * MAX_AT_ONCE


def test_a_profile_is_written_where_the_client_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    show("a b", profile=True)
    assert sorted(p.suffix for p in tmp_path.glob("performance_test_*")) == [".csv", ".json"]
    assert capsys.readouterr().err.count("performance metrics saved to") == 2


async def test_the_service_that_answers_is_found() -> None:
    async with target_site() as target, fused_site() as fused, worker_site(target.address) as worker:
        for site in (target, fused, worker):
            assert await service_at(site.address, None, 10.0) == site.service
        assert target.service == TARGET


async def test_a_server_without_any_of_the_services_is_named() -> None:
    async with listening(lambda server: None) as address, AsyncClient(address) as client:
        with pytest.raises(TandemError, match=address):
            await client.model_info()

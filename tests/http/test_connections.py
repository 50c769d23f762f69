"""What stands between clients and the door, balancers and old clients, loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.services.http import exchange, listener
from tests.http.site import COMPLETIONS, KEY, Site, at_door, door
from tests.support import HANG, run
from tests.toy import ToyConfig

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 12, "stream_options": {"include_usage": True}}


@contextlib.asynccontextmanager
async def full(**given: Any) -> AsyncIterator[tuple[Site, Any]]:
    """A door whose only slot is taken for some seconds."""
    async with (
        door(ToyConfig(step_seconds=0.02), slots=1, drafts=False, **given) as site,
        site.http.stream("POST", COMPLETIONS, json=LONG) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        yield site, answer


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BEGIN_SECONDS", 0.05)
    monkeypatch.setattr(exchange, "QUIET_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_waits_for_a_slot_begins_and_has_comments_that_are_no_events() -> None:
    own = {"extra_body": {"ignore_eos": SHORT["ignore_eos"]}}
    async with full() as (site, running):
        asked = {name: value for name, value in SHORT.items() if name != "ignore_eos"}
        other = asyncio.create_task(site.client.completions.create(model="toy", **asked, **own))
        async with site.http.stream("POST", COMPLETIONS, json=SHORT) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            waited = [await anext(lines) for _ in range(6)]
            assert waited == [": ", ""] * 3
            await running.aclose()  # which frees the slot
            rest = [line async for line in lines if line and line != ": "]
        events = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
        assert rest[-1] == "data: [DONE]" and events[-1]["usage"]["completion_tokens"] == 12
        seen = [event.choices[0].text async for event in await other if event.choices]
        assert "".join(seen) == "".join(each["choices"][0]["text"] for each in events if each["choices"])


@pytest.mark.usefixtures("impatient")
async def test_an_error_after_the_first_comment_is_the_last_event_and_one_before_has_its_status() -> None:
    async with full(queue=1) as (site, _):
        async with site.http.stream("POST", COMPLETIONS, json=SHORT) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": "
            full_queue = asyncio.gather(*(site.post(COMPLETIONS, SHORT) for _ in range(40)))
            assert (await site.refused(COMPLETIONS, {**SHORT, "top_p": 2}))["param"] == "top_p"
            await asyncio.sleep(0.2)
            await site.door.stop()
            rest = [line async for line in lines if line and line != ": "]
            assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "server_error"
            assert rest[-1] == "data: [DONE]"
        assert 429 in {each.status_code for each in await full_queue}


def test_an_idle_connection_is_closed_later_than_by_balancers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def seconds(kept: float) -> float:
        monkeypatch.setattr(listener, "KEEP_ALIVE_SECONDS", kept)
        async with door() as site:
            reader, writer = await asyncio.open_connection("127.0.0.1", site.door.port)
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"}")
            began = asyncio.get_running_loop().time()
            assert await asyncio.wait_for(reader.read(), HANG) == b""
            writer.close()
            return asyncio.get_running_loop().time() - began

    assert listener.KEEP_ALIVE_SECONDS > 60 and run(seconds(0.1)) < run(seconds(0.6))


@pytest.mark.parametrize("header", ["", "connection: keep-alive\r\n"])
@at_door()
async def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(site: Site, header: str) -> None:
    body = json.dumps(SHORT)
    head = f"POST {COMPLETIONS} HTTP/1.0\r\ncontent-type: application/json\r\n{header}"
    reader, writer = await asyncio.open_connection("127.0.0.1", site.door.port)
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    answer = (await asyncio.wait_for(reader.read(), HANG)).decode()
    writer.close()
    told, _, events = answer.partition("\r\n\r\n")
    assert told.startswith("HTTP/1.1 200 ") and "transfer-encoding" not in told.lower()
    assert events.startswith("data: {") and events.endswith("data: [DONE]\n\n")


@at_door()
async def test_a_body_in_a_coding_is_refused_in_plain_words(site: Site) -> None:
    for coding in ("gzip", "br", "gzip, gzip"):
        error = await site.refused(COMPLETIONS, gzip.compress(b"{}"), 415, **{"content-encoding": coding})
        assert error["message"] == f"content-encoding: {coding!r} is not served: send the JSON as it is"
    body = b'{"prompt": "hello", "max_tokens": 4, "temperature": 0}'
    assert (await site.post(COMPLETIONS, body, **{"content-encoding": "identity"})).status_code == 200


@at_door()
async def test_a_byte_order_mark_and_a_slash_after_a_path_change_nothing(site: Site) -> None:
    asked = b'\xef\xbb\xbf{"prompt": "hello", "max_tokens": 4, "temperature": 0}'
    plain = await site.text(max_tokens=4)
    assert (await site.post(f"{COMPLETIONS}/", asked)).json()["choices"][0]["text"] == plain
    for path in ("/v1/models", "/v1/models/toy", "/health", "/health/live", "/version"):
        one, other = await site.http.get(path), await site.http.get(f"{path}/")
        assert (one.status_code, one.json()) == (other.status_code, other.json()) and one.status_code == 200
    assert (await site.http.get("/v1/chat/")).status_code == 404
    assert (await site.http.get("/v1/models//", headers={"authorization": KEY})).status_code == 404

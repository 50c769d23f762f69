"""The worker of NVIDIA Dynamo: what it asks of a Tandem server, answers, refuses. Dynamo is not needed here."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem import AsyncClient
from tests.support import REPOSITORY, ServerProcess, run


@pytest.fixture(name="worker")
def the_worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "deploy" / "dynamo"))
    import tandem_worker  # type: ignore[import-not-found]

    return tandem_worker


def as_dynamo_asks(**options: Any) -> dict[str, Any]:
    """A request as Dynamo's frontend sends it: every field is there, most of them null."""
    sampling = dict.fromkeys(("n", "temperature", "top_p", "top_k", "seed", "guided_decoding"))
    stop = {"max_tokens": 7, "stop": None, "stop_token_ids_hidden": [0], "min_tokens": None, "ignore_eos": True}
    for name, value in options.items():
        (stop if name in stop else sampling)[name] = value
    asked = {"sampling_options": sampling, "stop_conditions": stop, "output_options": {"logprobs": None}}
    return {"token_ids": list(b"abab"), **asked}


def test_an_answer_is_dynamos_chunks_of_the_servers_tokens(worker: ModuleType, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--role", "fused_target", "--backend", "toy", "--port", "0")
    try:
        address = server.wait_ready()

        async def ask(**options: Any) -> tuple[list[int], dict[str, Any], tuple[int, ...]]:
            async with AsyncClient(address) as client:
                request = as_dynamo_asks(**options)
                *chunks, last = [chunk async for chunk in worker.answered(client, request)]
                sampling = worker.sampling_of(request["sampling_options"])
                plain = await client.generate(
                    request["token_ids"], sampling, max_new_tokens=7, ignore_end_of_sequence=True, drafts="none"
                )
                return [token for chunk in chunks for token in chunk["token_ids"]], last, plain.token_ids

        for options in ({}, {"temperature": 0.8, "seed": 3, "top_k": -1, "n": 1}):
            tokens, last, plain = run(ask(**options))
            assert tuple(tokens) == plain and len(tokens) == 7
            assert (last["token_ids"], last["finish_reason"]) == ([], "length")
            assert last["completion_usage"] == {"prompt_tokens": 4, "completion_tokens": 7, "total_tokens": 11}
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_what_the_worker_does_not_do_is_named_and_what_asks_for_nothing_is_not(worker: ModuleType) -> None:
    assert worker.unserved(as_dynamo_asks(n=1, min_tokens=0, stop=["x"])) == []
    asked = as_dynamo_asks(n=2, guided_decoding={"json": {}}, min_tokens=3)
    asked["output_options"]["logprobs"] = 1
    assert worker.unserved(asked) == ["n", "guided_decoding", "min_tokens", "logprobs"]


def test_draws_without_a_seed_differ_and_greedy_needs_none(worker: ModuleType) -> None:
    drawn = {worker.sampling_of({"temperature": 1.0}).seed for _ in range(8)}
    assert len(drawn) == 8
    assert worker.sampling_of({"temperature": None, "top_k": -1}) == worker.sampling_of({})

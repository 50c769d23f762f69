"""Metrics of real servers of every role: what a scrape says is what the completions said, counted and not estimated."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem import installing
from tandem.engine.batcher import Batcher
from tandem.rpc.channel import FUSED, TARGET
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import TandemError
from tandem.runners.startup import Startup
from tandem.services.observability.wiring import Observability
from tandem.services.shutdown import Lifecycle
from tandem.speculation.types import GenerationEnd, GenerationRequest, ModelInfo
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.support import (
    HANG,
    SAMPLED,
    ServerProcess,
    answer,
    distributed,
    forbid_imports,
    ids,
    raw_stub,
    run,
    server_process,
)

PROMPTS = (b"abcabcabcabc", b"one two three", b"x", b"to be or not to be or not to")


class Scrape:
    """One reading of a server's metrics."""

    def __init__(self, server: ServerProcess) -> None:
        ready = json.loads(server.ready_file.read_text())
        url = f"http://{ready['metrics_host']}:{ready['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=HANG) as reply:
            text = reply.read().decode()
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, /, **labels: str) -> float:
        """The sum of the samples of that name that have these labels."""
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"no {name} {labels}"
        return sum(found)


def after(server: ServerProcess, name: str, at_least: int, **labels: str) -> Scrape:
    """Waits until `name` was counted `at_least` times, and returns a scrape from after that.

    A client has its refusal, or is gone, before the server counts it. The page that shows the count is not returned: it
    is written counter by counter while the server counts, so its first counters may be older than its last.
    """
    give_up = time.monotonic() + HANG
    while True:
        scrape = Scrape(server)
        known = [s.value for s in scrape.samples if s.name == name and labels.items() <= s.labels.items()]
        if sum(known) >= at_least:
            return Scrape(server)
        assert time.monotonic() < give_up, f"{name}: {known}"


def asked(count: int = 20, **rest: Any) -> list[GenerationRequest]:
    """Requests that end at their length, so that no round is sent beyond their end."""
    requests = [ids(prompt, count + i, ignore_end_of_sequence=True, **rest) for i, prompt in enumerate(PROMPTS)]
    return [*requests, ids(b"sampled", count, sampling=SAMPLED, ignore_end_of_sequence=True, **rest)]


async def completions(generate: Any, requests: Iterable[GenerationRequest]) -> list[GenerationEnd]:
    return [(await answer(generate, request)).completion for request in requests]


def check_speculation(scrape: Scrape, done: list[GenerationEnd]) -> None:
    """vLLM's counters, and ours of the same rounds."""
    stats = [each.stats for each in done]
    drafted_rounds = sum(s.drafted_per_position[0] for s in stats if s.drafted_per_position)
    assert scrape("vllm:spec_decode_num_drafts_total") == drafted_rounds
    assert scrape("vllm:spec_decode_num_draft_tokens_total") == sum(s.drafted for s in stats)
    assert scrape("vllm:spec_decode_num_accepted_tokens_total") == sum(s.accepted for s in stats)
    assert scrape("tandem:speculation_rounds_total") == sum(s.rounds for s in stats)
    for position in range(5):
        at = str(position)
        accepted = sum(s.accepted_per_position[position] for s in stats if position < len(s.accepted_per_position))
        drafted = sum(s.drafted_per_position[position] for s in stats if position < len(s.drafted_per_position))
        assert scrape("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=at) == accepted
        assert scrape("tandem:draft_tokens_per_pos_total", position=at) == drafted
    assert scrape("vllm:generation_tokens_total") == sum(each.output_tokens for each in done)
    assert scrape("vllm:prompt_tokens_total") == sum(each.prompt_tokens for each in done)


def check_requests(scrape: Scrape, done: list[GenerationEnd]) -> None:
    assert scrape("vllm:request_success_total", finished_reason="length") == len(done)
    assert scrape("vllm:request_success_total") == len(done)
    for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"):
        assert scrape(f"vllm:{name}_seconds_count") == len(done), name
    rounds = sum(each.stats.rounds for each in done)  # several may come in one chunk
    assert 0 < scrape("vllm:inter_token_latency_seconds_count") <= rounds - len(done)
    spent = sum(each.stats.verify_seconds for each in done)
    assert scrape("tandem:request_seconds_total", cause="verify") == pytest.approx(spent)


def test_counters_of_a_fused_server_equal_its_completions(tmp_path: Path) -> None:
    async def ask(address: str) -> list[GenerationEnd]:
        async with GenerationClient.connect(address, FUSED) as client:
            return await completions(client.generate, [*asked(), *asked(speculation_length=2)])

    arguments = ("--role", "fused_target", "--draft_model", "miss=0.3", "--metrics_port", "0", "--batch", "2")
    with server_process(tmp_path, *arguments, "--http_port", "0") as server:
        done = run(ask(server.wait_ready()))
        scrape = Scrape(server)
        port = json.loads(server.ready_file.read_text())["http_port"]
        httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x", "max_tokens": 2}).raise_for_status()
        after(server, "tandem:rpcs_total", 1, method="OpenAI/Generate", code="OK")
    assert sum(each.stats.accepted for each in done) > 20, "nothing was accepted: the counts would prove little"
    check_speculation(scrape, done)
    check_requests(scrape, done)
    method = "FusedSpeculativeServer/Generate"
    assert scrape("tandem:rpcs_total", method=method, code="OK") == len(done)
    assert scrape("tandem:kv_slots", of="target") == 2
    assert scrape("tandem:kv_slots_used") == scrape("vllm:num_requests_running") == 0
    assert scrape("tandem:step_rows_count", kind="fused") == scrape("tandem:step_seconds_count", kind="fused")
    assert scrape("tandem:step_rows_sum", kind="fused") == sum(each.stats.rounds for each in done)
    assert scrape("tandem:build_info", role="fused_target", backend="toy") == 1
    assert scrape("tandem:startup_seconds", stage="total") > 0


@pytest.mark.parametrize("pipeline", daily([Pipeline.OFF, Pipeline.ON, Pipeline.NEVER_WAITING], 2))
def test_counters_of_a_target_equal_the_completions_of_its_clients(tmp_path: Path, pipeline: Pipeline) -> None:
    """What the target counts is what those who drafted say."""

    async def ask(address: str) -> tuple[list[GenerationEnd], int, int]:
        async with distributed(address, "miss=0.3", pipeline=pipeline) as (generator, _):
            done = await completions(generator.generate, [*asked(), *asked(speculation_length=4)])
        return done, sum(c.stats.bytes_up for c in done), sum(c.stats.bytes_down for c in done)

    with server_process(tmp_path, "--role", "target", "--model", "step=0.003", "--metrics_port", "0") as server:
        done, up, down = run(ask(server.wait_ready()))
        # The server notes the end of a stream a moment after its client has left it.
        scrape = after(server, "tandem:rpcs_total", len(done), method="TargetVerifier/VerifyStream")
    check_speculation(scrape, done)
    rounds, stale = sum(c.stats.rounds for c in done), sum(c.stats.stale_rounds for c in done)
    transport, other = ("run", "stream") if pipeline is Pipeline.NEVER_WAITING else ("stream", "run")
    assert scrape("tandem:rounds_total", outcome="applied", transport=transport) == rounds
    assert scrape("tandem:rounds_total", transport=other) == 0
    assert scrape("tandem:rounds_total", outcome="stale", transport=transport) <= stale
    assert scrape("tandem:sessions_opened_total", kind="verify") == len(done)
    assert scrape("tandem:sessions_closed_total", kind="verify") == len(done)
    assert scrape("tandem:sessions", kind="verify") == scrape("tandem:sessions_expired_total", kind="verify") == 0
    assert scrape("tandem:session_resumes_total") == 0
    assert scrape("tandem:step_rows_sum", kind="verify") == rounds
    assert scrape("tandem:rpcs_total", method="TargetVerifier/OpenSession", code="OK") == len(done)
    if pipeline is Pipeline.NEVER_WAITING:
        steps = sum(c.stats.run_steps for c in done)
        drafted = sum(c.stats.drafted_per_position[0] for c in done if c.stats.drafted_per_position)
        assert scrape("tandem:run_steps_total", draft="with") == drafted > 0
        assert scrape("tandem:run_steps_total", draft="without") == steps - drafted
    else:
        assert scrape("tandem:run_steps_total") == 0
    if pipeline is Pipeline.OFF:
        methods = ("OpenSession", "VerifyStream", "CloseSession")
        assert sum(scrape("tandem:bytes_total", method=f"TargetVerifier/{m}", direction="in") for m in methods) == up
        assert sum(scrape("tandem:bytes_total", method=f"TargetVerifier/{m}", direction="out") for m in methods) == down
        assert scrape("tandem:rpcs_total", method="TargetVerifier/VerifyStream") == len(done)


def test_a_target_that_asks_a_draft_worker_counts_proposals_and_rounds_without_any(tmp_path: Path) -> None:
    async def ask(address: str) -> list[GenerationEnd]:
        async with GenerationClient.connect(address, TARGET) as client:
            return await completions(client.generate, asked(speculation_length=3))

    with server_process(
        tmp_path, "--role", "draft_worker", "--propose_only", "--metrics_port", "0", ready_file="worker.json"
    ) as worker:
        waiting = ("--pipeline", "off", "--draft_host", worker.wait_ready())
        arguments = ("--role", "target", "--metrics_port", "0", *waiting)
        with server_process(tmp_path, *arguments) as target:
            address = target.wait_ready()
            done = run(ask(address))
            of_target, of_worker = Scrape(target), Scrape(worker)
            check_speculation(of_target, done)
            check_requests(of_target, done)
            assert of_target("tandem:drafter_up") == 1
            assert of_target("tandem:undrafted_rounds_total") == of_target("tandem:draft_failures_total") == 0
            assert of_worker("tandem:sessions_opened_total", kind="propose") == len(done)
            worker.stop()
            more = run(ask(address))
            scrape = Scrape(target)
    assert sum(c.stats.drafted_by.get("model", 0) for c in more) == 0  # copies are made at the target
    check_speculation(scrape, [*done, *more])
    assert scrape("tandem:drafter_up") == 0
    assert scrape("tandem:draft_failures_total") >= 1
    undrafted = sum(c.stats.undrafted_rounds for c in more)
    assert scrape("tandem:undrafted_rounds_total") == undrafted > 0


def test_rounds_again_stale_rounds_resumes_and_refusals_are_counted(tmp_path: Path) -> None:
    async def ask(address: str) -> None:
        async with raw_stub(address) as stub:
            await stub.OpenSession(pb.OpenSessionRequest(session_id="s", prefix=[1, 2, 3], prompt_length=3))
            round_ = pb.VerifyRequest(session_id="s", base_length=3, last_token=3, draft_tokens=[4, 5])
            for _ in range(2):
                reply = await stub.Verify(round_)
            assert reply.replayed
            stale = pb.VerifyRequest(session_id="s", base_length=2, last_token=9)
            assert (await stub.Verify(stale)).stale
            prefix = [1, 2, 3, *reply.token_ids]
            await stub.OpenSession(pb.OpenSessionRequest(session_id="s", prefix=prefix, prompt_length=3))
        async with GenerationClient.connect(address, TARGET) as client:
            for broken in (ids([999]), ids(b"abc", 10_000)):
                with pytest.raises(TandemError):
                    await answer(client.generate, broken)

    with server_process(tmp_path, "--role", "target", "--metrics_port", "0") as server:
        run(ask(server.wait_ready()))
        scrape = after(server, "tandem:rpcs_total", method="TargetVerifier/Generate", at_least=2)
    for outcome in ("applied", "replayed", "stale"):
        assert scrape("tandem:rounds_total", outcome=outcome, transport="unary") == 1
    assert scrape("tandem:session_resumes_total") == 1
    assert scrape("tandem:sessions", kind="verify") == scrape("tandem:kv_slots_used", of="target") == 1
    assert scrape("vllm:num_requests_running") == 1
    method = "TargetVerifier/Generate"
    assert scrape("tandem:refusals_total", method=method, reason="INVALID_FIELD") == 1
    assert scrape("tandem:refusals_total", method=method, reason="SEQUENCE_TOO_LONG") == 1
    assert scrape("tandem:rpcs_total", method=method, code="INVALID_ARGUMENT") == 1
    assert scrape("tandem:rpcs_total", method=method, code="OUT_OF_RANGE") == 1
    assert scrape("vllm:request_success_total", finished_reason="error") == 2
    assert scrape("vllm:spec_decode_num_draft_tokens_total") == 2


def test_a_request_that_is_left_is_counted_as_aborted_with_the_rounds_it_had(tmp_path: Path) -> None:
    async def ask(address: str) -> None:
        async with GenerationClient.connect(address, FUSED) as client:
            events = client.generate(ids(b"abc", 200, ignore_end_of_sequence=True))
            for _ in range(3):
                await anext(events)
            await events.aclose()

    method = "FusedSpeculativeServer/Generate"
    arguments = ("--role", "fused_target", "--model", "step=0.03", "--draft_model", "miss=0.3", "--metrics_port", "0")
    with server_process(tmp_path, *arguments) as server:
        run(ask(server.wait_ready()))
        scrape = after(server, "tandem:rpcs_total", at_least=1, method=method)
    assert scrape("vllm:request_success_total", finished_reason="abort") == 1
    assert scrape("tandem:rpcs_total", method=method, code="CANCELLED") == 1
    assert 3 <= scrape("tandem:speculation_rounds_total") < 200
    tokens = scrape("vllm:generation_tokens_total")
    assert tokens == scrape("tandem:speculation_rounds_total") + scrape("vllm:spec_decode_num_accepted_tokens_total")


def test_without_a_port_nothing_of_prometheus_is_loaded_or_called(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_imports(
        monkeypatch, "prometheus_client", "tandem.services.observability.metrics", "tandem.services.http.listener"
    )
    seen, batcher = Observability("target", "127.0.0.1", None), Batcher("test")
    seen.watch_parts(Lifecycle(), batcher, {})
    assert seen.watch is None and batcher.observe is None
    run(batcher.close())


def test_a_port_without_a_library_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "find_spec", {"prometheus_client": True}.get)
    with pytest.raises(ValueError, match=r"metrics_port: uvicorn is not installed; make setup"):
        Observability("target", "127.0.0.1", 0)


async def test_the_port_answers_503_until_the_model_is_loaded_and_the_metrics_from_then_on() -> None:
    seen = Observability("target", "127.0.0.1", 0)
    url = f"http://127.0.0.1:{seen.ready(Startup())['metrics_port']}"

    async def serving() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=HANG) as http:
            assert [(await http.get(path)).status_code for path in ("/metrics", "/other")] == [503, 404]
            seen.loaded(ModelInfo("toy", "rev", "sha", 100, 512, 8, 4, "float32", "toy", "toy"))
            assert 'model_name="toy"' in (await http.get("/metrics")).text

    await seen.during(serving())

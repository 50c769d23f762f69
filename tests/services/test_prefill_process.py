"""The role prefill as a process, beside targets that ask it: readiness, answers, metrics, SIGTERM, a dead worker."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from tandem.rpc.channel import FUSED, TARGET
from tandem.rpc.generation_client import GenerationClient
from tests.services.test_prefill import PROMPT, WHOLE
from tests.services.test_process import health, services
from tests.support import GREEDY, SAMPLED, answer, ids, oracle, run, server_process

WAITS = ("--prefill_min_tokens", "32", "--sequence_length", "160")


def metric(page: str, name: str) -> float:
    (line,) = (line for line in page.splitlines() if line.startswith(f"tandem:prefill_{name} "))
    return float(line.split()[-1])


def metrics(ready: Path) -> str:
    port = json.loads(ready.read_text())["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        return str(page.read().decode())


@pytest.mark.thorough
def test_processes_hand_over_pages_and_a_killed_worker_costs_no_token(tmp_path: Path) -> None:
    async def said(address: str, service: str, prompt: list[int]) -> None:
        async with GenerationClient.connect(address, service) as client:
            for sampling in (GREEDY, SAMPLED):
                request = ids(prompt, 24, sampling=sampling, ignore_end_of_sequence=True)
                expected = oracle(prompt, sampling, 24, past_the_end=True)
                assert (await answer(client.generate, request)).token_ids == expected

    (tmp_path / "worker").mkdir()
    serving = health_pb2.HealthCheckResponse.SERVING
    with server_process(tmp_path / "worker", "--role", "prefill", "--sequence_length", "160") as worker:
        address = worker.wait_ready()
        assert run(health(address, "tandem.v1.PrefillWorker")) == serving
        assert "tandem.v1.PrefillWorker" in run(services(address))
        for role, service in (("target", TARGET), ("fused_target", FUSED)):
            (tmp_path / role).mkdir()
            own = ("--role", role, "--prefill", address, "--metrics_port", "0", *WAITS)
            with server_process(tmp_path / role, *own) as server:
                at = server.wait_ready()
                run(said(at, service, PROMPT))
                page = metrics(server.ready_file)
                assert metric(page, "pages_total") == WHOLE // 16, "the second request finds what the first one left"
                assert metric(page, "requests_total") == 1 and 'prefill_fallbacks_total{reason="late"} 0.0' in page
                assert server.stop() == 0
                assert "Traceback" not in server.log.read_text()
        (tmp_path / "late").mkdir()
        with server_process(
            tmp_path / "late", "--role", "target", "--prefill", address, "--metrics_port", "0", *WAITS
        ) as server:
            at = server.wait_ready()
            worker.process.kill()
            worker.process.wait(60)
            run(said(at, TARGET, PROMPT))
            page = metrics(server.ready_file)
            assert 'prefill_fallbacks_total{reason="unavailable"} 1.0' in page
            assert metric(page, "pages_total") == 0


def test_a_target_starts_without_its_worker_and_says_so(tmp_path: Path) -> None:
    with server_process(tmp_path, "--role", "target", "--prefill", "127.0.0.1:9", *WAITS) as server:
        server.wait_ready()
        assert "prefill at 127.0.0.1:9: unavailable" in server.log.read_text()
        assert server.stop() == 0

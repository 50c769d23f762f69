"""What a server's metrics and log lines say of its adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tandem.engine.sequences import LocalVerifier
from tandem.rpc.channel import FUSED
from tandem.rpc.generation_client import GenerationClient
from tandem.services.observability.metrics import Metrics
from tandem.speculation.types import GenerationRequest, Request
from tests.engine.test_adapters import PROMPT, engine_with
from tests.services.test_metrics import Scrape
from tests.support import GREEDY, answer, ids, run, server_process, until


def asking(adapter: str) -> GenerationRequest:
    return ids(PROMPT, 12, ignore_end_of_sequence=True, adapter=adapter)


def samples(metrics: Metrics, name: str) -> dict[str, float]:
    """The samples of a metric, by the value of the label that tells them apart."""
    found = (s for family in metrics.registry.collect() for s in family.samples if s.name == name)
    return {s.labels.get("adapter") or s.labels.get("running_lora_adapters", ""): s.value for s in found}


def test_the_lines_of_requests_name_their_adapter(tmp_path: Path) -> None:
    async def ask(address: str) -> None:
        async with GenerationClient.connect(address, FUSED) as client:
            for name in ("", "red", "red", "blue"):
                await answer(client.generate, asking(name))

    more = ("--draft_model", "miss=0.3", "--adapters", "red=red,blue=blue,idle=idle", "--metrics_port", "0")
    with server_process(tmp_path, "--role", "fused_target", *more) as server:
        run(ask(server.wait_ready()))
        scrape = Scrape(server)
    now = scrape("vllm:lora_requests_info", max_lora="64", running_lora_adapters="", waiting_lora_adapters="")
    assert now > 1e9
    lines = [line for line in server.log.read_text().splitlines() if "tandem.request" in line]
    for line, said in zip(lines, ("OK, length, ", "adapter red", "adapter red", "adapter blue"), strict=True):
        assert f"{said}, 57 prompt tokens".replace(", ,", ",") in line, line


async def test_adapters_in_use_run_or_wait() -> None:
    async with engine_with("red", "blue") as engine:
        metrics = Metrics("target", "toy", 5, {})
        metrics.states.watch_engines({"target": engine})
        verifiers = [LocalVerifier(engine, Request(GREEDY, adapter="red")) for _ in range(engine.slots.count)]
        for verifier in verifiers:
            await verifier.open(PROMPT[:2])
        late = asyncio.ensure_future(LocalVerifier(engine, Request(GREEDY, adapter="blue")).open(PROMPT[:2]))
        await until(lambda: bool(engine.slots.waiting))
        assert (engine.adapters.running, engine.adapters.waiting) == (["red"], ["blue"])
        assert list(samples(metrics, "vllm:lora_requests_info")) == ["red"]
        late.cancel()
        await asyncio.gather(late, *(verifier.close() for verifier in verifiers), return_exceptions=True)
        assert (engine.adapters.running, engine.adapters.waiting) == ([], [])

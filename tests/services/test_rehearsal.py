"""Servers that rehearse say so wherever they describe themselves, count late steps, and give the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.rpc.channel import DRAFT, FUSED, TARGET, open_channel
from tandem.rpc.generation_client import GenerationClient
from tests.services.test_metrics import Scrape
from tests.support import GREEDY, Answer, answer, ids, oracle, run, run_here, server_process

TIMES = {
    "format": "tandem-step-times-1",
    "name": "a-test",
    "device": "a device",
    "source": "this test",
    "target": {"model": "t", "steps": [{"ms": 4}]},
    "draft": {"model": "d", "steps": [{"ms": 1}]},
}
PROMPT = b"rehearse this"


@pytest.fixture
def times(tmp_path: Path) -> str:
    file = tmp_path / "times.json"
    file.write_text(json.dumps(TIMES))
    return str(file)


def asked(address: str, service: str) -> tuple[Answer, list[tuple[str, int]], str]:
    """An answer, the rehearsed parts with their steps, and the device."""

    async def ask() -> tuple[Answer, list[tuple[str, int]], str]:
        async with open_channel(address) as channel:
            client = GenerationClient(channel, service)
            got = await answer(client.generate, ids(PROMPT))
            info = await client.model_info()
            return got, [(each.part, each.steps) for each in info.rehearsals], info.device

    return run(ask())


def test_a_target_and_a_worker_of_its_rehearse_each_its_own_part(tmp_path: Path, times: str) -> None:
    flags = ("--rehearse", times)
    with server_process(tmp_path, "--role", "target", *flags, "--metrics_port", "0") as target:
        host, _, port = target.wait_ready().rpartition(":")
        where = ("--target_host", host, "--target_port", port, "--draft_model", "miss=0.3")
        with server_process(tmp_path, "--role", "draft_worker", *where, *flags, ready_file="worker.json") as worker:
            got, told, device = asked(worker.wait_ready(), DRAFT)
        plain, told_by_target, _ = asked(f"{host}:{port}", TARGET)
        scrape = Scrape(target)
    assert got.token_ids == plain.token_ids == oracle(list(PROMPT), GREEDY, 24)
    assert [part for part, steps in told if steps] == ["draft"]
    assert [part for part, steps in told_by_target if steps] == ["target"]
    assert device == "a device, rehearsed on toy"
    assert scrape("tandem:rehearsal_info", device="a device", name="a-test", of="target", source="this test") == 1
    assert scrape("tandem:rehearsed_steps_total") > 0 and scrape("tandem:rehearsed_late_steps_total") >= 0


def test_a_fused_server_rehearses_both(tmp_path: Path, times: str) -> None:
    arguments = ("--role", "fused_target", "--draft_model", "miss=0.3", "--rehearse", times)
    with server_process(tmp_path, *arguments) as server:
        got, told, _ = asked(server.wait_ready(), FUSED)
    assert got.token_ids == oracle(list(PROMPT), GREEDY, 24)
    assert [part for part, _ in told] == ["target", "draft"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--rehearse", "trn9"), "rehearse: 'trn9' is neither a file nor one of h100-llama-8b, trn2-llama-8b"),
        (("--rehearse", "trn2-llama-8b", "--tp_degree", "2"), "tp_degree"),
        (("--rehearse", "trn2-llama-8b", "--backend", "nxdi"), "rehearse"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_in_one_line(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    ended = run_here(tmp_path, "--role", "target", *flags)
    assert ended.returncode == 2
    assert said in ended.stderr and "Traceback" not in ended.stderr

"""Whole servers on a stand-in for a Neuron device, which refuses what the real one would: strict_device.py.

A fused server, a target and a draft worker run as processes with gRPC; their tokens are those of plain decoding by
module code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.generators import plain_generator
from tandem.engine.load_models import load
from tandem.engine.model_config import ModelConfig
from tandem.launch import free_port
from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.generation_client import GenerationClient
from tandem.runners.eagle.module import write_head
from tandem.runners.load_runner import Execution, Shape
from tandem.speculation.types import GenerationRequest, Rule
from tests.runners.test_eagle import a_head
from tests.runners.tiny import model_folder
from tests.support import GREEDY, SAMPLED, ServerProcess, answer, run

SHAPE = Shape(slots=2, max_length=64, max_draft=2, chunk=16)
FLAGS = ("--device", "neuron", "--dtype", "float32", "--batch", "2", "--sequence_length", "64", "--port", "0")
FLAGS += ("--max_speculation_length", "2", "--prefill_chunk", "16")
PROMPTS = ((70, 71, 72), (80,), tuple(range(60, 80)), (90, 91))
STARTS = 240.0
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(500)]


def requests() -> list[GenerationRequest]:
    """More than there are slots, of all kinds: rows join and leave while others run."""
    kinds = ((GREEDY, 12), (SAMPLED, 20), (SAMPLED, 7), (GREEDY, 25))
    return [
        GenerationRequest(token_ids=prompt, max_new_tokens=count, sampling=sampling, ignore_end_of_sequence=True)
        for prompt, (sampling, count) in zip(PROMPTS, kinds, strict=True)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return str(model_folder(folder / "target", 1)), str(model_folder(folder / "draft", 2))


@pytest.fixture(scope="module")
def expected(models: tuple[str, str]) -> list[tuple[int, ...]]:
    """Plain decoding's tokens, by module code on the CPU."""

    async def scenario() -> list[tuple[int, ...]]:
        batcher = Batcher("plain")
        try:
            config = ModelConfig(Execution("cpu", "float32", threads=1, compile="off"), SHAPE, models[0])
            generate = plain_generator(await load(config, batcher)).generate
            return [(await answer(generate, request)).token_ids for request in requests()]
        finally:
            await batcher.close()

    return run(scenario())


@contextlib.contextmanager
def strict(folder: Path, *arguments: str, last: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """A server on the stand-in; report.json in its folder says what happened as it ends."""
    folder.mkdir()
    program = ("-m", "tests.runners.strict_device", str(folder / "report.json"))
    server = ServerProcess(folder, *arguments, *FLAGS, *last, program=program)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def report(server: ServerProcess) -> dict[str, Any]:
    assert server.stop() == 0, server.log.read_text()
    return json.loads((server.folder / "report.json").read_text())


async def served(address: str, service: str, expected: list[tuple[int, ...]]) -> None:
    """One at a time, all at once, and with one that its client cancels, every answer is plain decoding's."""
    async with GenerationClient.connect(address, service) as client:
        alone = [(await answer(client.generate, request)).token_ids for request in requests()]
        assert alone == expected
        leaving = client.generate(requests()[3])
        await anext(leaving)
        together = asyncio.gather(*(answer(client.generate, request) for request in requests()))
        await leaving.aclose()
        assert [each.token_ids for each in await together] == expected
        for request in requests()[:2]:  # by the rejection rule: the same tokens every time
            ruled = GenerationRequest(
                token_ids=request.token_ids,
                max_new_tokens=8,
                sampling=request.sampling,
                rule=Rule.REJECTION,
                ignore_end_of_sequence=True,
            )
            first, second = [(await answer(client.generate, ruled)).token_ids for _ in range(2)]
            assert first == second and len(first) == 8
            assert request.sampling != GREEDY or first == expected[0][:8]


def clean(seen: dict[str, Any]) -> None:
    assert seen["graphs"] and seen["calls"] > 50 and seen["copies"]
    assert (seen["compiled_later"], seen["refused"]) == (0, [])
    assert seen["copies"] <= seen["calls"], "a graph's results are copied once"


def test_a_fused_server_runs_on_what_a_device_takes(
    models: tuple[str, str], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    words = ("--role", "fused_target", "--target_model", models[0], "--draft", "model", "--draft_model", models[1])
    with strict(tmp_path / "fused", *words) as server:
        run(served(server.wait_ready(STARTS), FUSED, expected))
        clean(report(server))


def test_a_fused_server_with_an_eagle_head_runs_on_what_a_device_takes(
    models: tuple[str, str], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    write_head(tmp_path / "head", a_head())
    words = ("--role", "fused_target", "--target_model", models[0], "--draft", "eagle")
    with strict(tmp_path / "fused", *words, "--draft_model", str(tmp_path / "head")) as server:
        run(served(server.wait_ready(STARTS), FUSED, expected))
        clean(report(server))


def test_a_target_and_a_draft_worker_run_on_what_a_device_takes(
    models: tuple[str, str], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    with strict(tmp_path / "target", "--role", "target", "--model", models[0]) as target:
        host, _, port = target.wait_ready(STARTS).partition(":")
        words = ("--role", "draft_worker", "--draft", "model", "--draft_model", models[1], "--speculation_length", "2")
        waiting = ("--pipeline", "off", "--target_host", host, "--target_port", port)  # so that it always drafts
        with strict(tmp_path / "worker", *words, *waiting) as worker:
            run(served(worker.wait_ready(STARTS), DRAFT, expected))
            clean(report(worker))
        run(served(f"{host}:{port}", TARGET, expected))
        clean(report(target))


def compile_without_a_device(model: str, folder: Path, *launchers: list[str], ranks: int = 1) -> None:
    """As on a CPU instance with AWS's wheels: the stand-in refuses whatever asks the runtime. A launcher is a host."""
    shape = [*FLAGS[: FLAGS.index("--port")], "--batch", "1", "--max_speculation_length", "1", "--prefill_chunk", "16"]
    words = ["--role", "compile", "--compile", "neuron", "--target_model", model, "--tp_degree", str(ranks)]
    program = ["-m", "tests.runners.strict_device", f"{folder}.json", *words, *shape, "--compiled_dir"]
    environ = {"TORCH_NEURONX_COMPILE_ONLY": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    started = [
        subprocess.Popen(
            [sys.executable, *launcher, *program, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
        )
        for launcher in launchers or ([],)
    ]
    said = [process.communicate(timeout=STARTS)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), said
    assert "2 compiled" in said[0], said


def test_two_hosts_compile_without_a_device_into_folders_of_their_own(models: tuple[str, str], tmp_path: Path) -> None:
    """With gloo in place of the device's collectives, so this says nothing of AWS's. Two hosts are one address here."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    place = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]
    launchers = [[*torchrun, *place, str(host)] for host in range(2)]
    compile_without_a_device(models[0], tmp_path / "made", *launchers, ranks=2)
    made = [sorted(file.name for file in (tmp_path / "made" / f"rank_{rank}").glob("*.neff")) for rank in range(2)]
    assert len(made[0]) == 2 and made[0] == made[1], "all ranks compile the same graphs"


def test_a_server_finds_what_was_compiled_without_a_device_and_copied(models: tuple[str, str], tmp_path: Path) -> None:
    compile_without_a_device(models[0], tmp_path / "made")
    assert len(list((tmp_path / "made").glob("*.neff"))) == 2
    (tmp_path / "made").rename(tmp_path / "copied")
    served = ("--role", "target", "--model", models[0], "--compiled_dir", str(tmp_path / "copied"))
    smaller = ("--batch", "1", "--max_speculation_length", "1")
    with strict(tmp_path / "target", *served, last=smaller) as server:
        server.wait_ready(STARTS)
        seen = report(server)
    assert seen["found"] == seen["graphs"] == 2, "the server would have compiled none"

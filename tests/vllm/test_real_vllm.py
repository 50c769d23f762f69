"""The real vLLM, its CPU build, with the shipped pair: `make engines`. Its texts are those that it has without drafts.

vLLM is in an environment of its own (benchmarks/install_vllm_cpu.sh), which TANDEM_VLLM_PYTHON names.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_peer
from benchmarks.contenders import encode
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import find
from tandem.comparison.measuring.workloads import built_in_prompts
from tests.support import REPOSITORY, ServerProcess

PYTHON = os.environ.get(vllm_peer.VARIABLE) or str(REPOSITORY / ".venv-vllm/bin/python")
ABSENT = vllm_peer.absence(PYTHON)
PROGRAM = Path(__file__).with_name("vllm_program.py")
DRAFTED = {"method": "custom_class", "model": "tandem.vllm.RemoteDrafter", "num_speculative_tokens": 3}
ROWS, TOKENS = 8, 32
SMALL_CACHE = 48 << 20
"""Bytes in which 8 rows have no room, so that vLLM preempts some."""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT)),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def model() -> str:
    return str(unpacked(find(None)).folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """40 prompts, each cut to 96 tokens: the workloads', and their second halves."""
    texts = list(encode(built_in_prompts()).values())
    every = [*texts, *(text[len(text) // 2 :] for text in texts)]
    return [text[:96] for text in every[:40]]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[ServerProcess]:
    """A DraftWorker with the shipped draft."""
    flags = ("--role", "draft_worker", "--propose_only", "--batch", "16", "--sequence_length", "512", "--port", "0")
    process = ServerProcess(tmp_path, *flags)
    yield process
    process.process.kill()
    process.process.wait()


Use = Callable[[vllm_peer.Peer], Awaitable[Any]]


def vllm(folder: Path, model: str, use: Use, drafts: dict[str, str] | None = None, **settings: Any) -> Any:
    """What `use` returns of a vLLM of its own. `drafts`: the drafter's settings, by the ends of its variables."""

    async def ask() -> Any:
        env = {**vllm_peer.environment(PYTHON, 1), "PYTHONPATH": str(REPOSITORY)}
        env |= {f"TANDEM_DRAFT_{name}": value for name, value in (drafts or {}).items()}
        peer = vllm_peer.Peer("vLLM", [PYTHON, str(PROGRAM)], env, folder / "vllm.log", 1700.0)
        try:
            asked = vllm_peer.settings(model, 384, ROWS, DRAFTED if drafts else None)
            await peer.start({**asked, "dtype": "float32", "enforce_eager": True, **settings})
            return await use(peer)
        finally:
            await peer.stop()

    return asyncio.run(ask())


def asking(prompts: list[list[int]], **more: Any) -> Use:
    asked = {"prompts": prompts, "max_new_tokens": TOKENS, "at_once": ROWS, "cancelled": [], **more}
    return lambda peer: peer._ask(asked)


@pytest.fixture(scope="module")
def plain(model: str, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """vLLM's own tokens, without drafts."""
    answer = vllm(tmp_path_factory.mktemp("plain"), model, asking(prompts))
    tokens: list[list[int]] = answer["tokens"]
    assert all(len(each) == TOKENS for each in tokens)
    return tokens


@pytest.mark.parametrize("budget_ms", ["200", "0"])
def test_greedy_tokens_are_those_of_vllm_alone(
    tmp_path: Path, model: str, prompts: list[list[int]], plain: list[list[int]], worker: ServerProcess, budget_ms: str
) -> None:
    drafts = {"WORKERS": worker.wait_ready(), "BUDGET_MS": budget_ms}
    answer = vllm(tmp_path, model, asking(prompts), drafts)
    same = sum(one == other for one, other in zip(answer["tokens"], plain, strict=True))
    assert same == len(prompts), f"{same} of {len(prompts)}"
    assert answer["counted"]["vllm:spec_decode_num_accepted_tokens"] > 20
    assert "made a mistake" not in (tmp_path / "vllm.log").read_text()


@pytest.mark.parametrize("budget_ms", ["200", "0"])
def test_a_hundred_requests_some_cancelled_and_some_preempted_while_the_worker_hangs_and_comes_back(
    tmp_path: Path, model: str, prompts: list[list[int]], plain: list[list[int]], worker: ServerProcess, budget_ms: str
) -> None:
    cancelled = list(range(5, 100, 9))
    numbers = [number % len(prompts) for number in range(100)]
    drafts = {"WORKERS": worker.wait_ready(), "BUDGET_MS": budget_ms, "ANSWER_SECONDS": "1"}

    async def use(peer: vllm_peer.Peer) -> Any:
        answering = asyncio.ensure_future(asking([prompts[n] for n in numbers], cancelled=cancelled)(peer))
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP, signal.SIGCONT):
            await asyncio.sleep(4)
            worker.process.send_signal(number)
        return await answering

    answer = vllm(tmp_path, model, use, drafts, kv_cache_memory_bytes=SMALL_CACHE)
    assert answer["counted"]["vllm:num_preemptions"] > 0
    assert answer["counted"]["vllm:spec_decode_num_accepted_tokens"] > 20
    for number, tokens in enumerate(answer["tokens"]):
        expected = plain[numbers[number]]
        assert tokens == (expected[: len(tokens)] if number in cancelled else expected), number
    assert "made a mistake" not in (tmp_path / "vllm.log").read_text()

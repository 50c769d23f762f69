"""The worker of OpenVINO GenAI, the real script over a planted library."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from benchmarks.openvino_peer import WORKER, absence, settings
from benchmarks.peers import PeerFailed
from benchmarks.vllm_peer import Peer

PLANTED = """
__version__ = "0.1.2-345-abc"

class SchedulerConfig:
    pass

class GenerationConfig:
    pass

class Output:
    def __init__(self, tokens):
        self.generated_ids = tokens

class Handle:
    def __init__(self, tokens):
        self.left, self.ready = tokens, []

    def can_read(self):
        return bool(self.ready)

    def read(self):
        ready, self.ready = self.ready, []
        return {0: Output(ready)}

class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties):
        if not model.endswith("Q8_0.gguf"):
            raise RuntimeError("Unsupported quantization type\\nand more")
        assert scheduler.max_num_seqs == 8 and not scheduler.enable_prefix_caching
        assert (device, properties) == ("CPU", {"INFERENCE_NUM_THREADS": 2})
        self.handles = []

    def add_request(self, number, tensor, config):
        assert config.ignore_eos and not config.do_sample
        begin = int(tensor[0][-1]) + 1
        self.handles.append(Handle(list(range(begin, begin + config.max_new_tokens))))
        return self.handles[-1]

    def has_non_finished_requests(self):
        return any(handle.left for handle in self.handles)

    def step(self):
        print("a library that prints")
        for handle in self.handles:
            handle.ready, handle.left = handle.left[:1], handle.left[1:]
"""


@pytest.fixture
def planted(tmp_path):
    """A worker that finds an openvino_genai of this test's own, started, asked by `use`, and stopped."""
    (tmp_path / "openvino_genai.py").write_text(PLANTED)
    (tmp_path / "openvino.py").write_text("def Tensor(array):\n    return array\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(use, file_type="Q8_0"):
        async def inside():
            peer = Peer("openvino Q8_0", [sys.executable, str(WORKER)], env, tmp_path / "peer.log", 60.0)
            try:
                asked = settings(Path(f"{file_type}.gguf"), file_type, 2, 8)
                return await use(peer, await peer.start(asked))
            finally:
                await peer.stop()

        return asyncio.run(inside())

    return run


def test_a_worker_answers_one_prompt_or_many(planted):
    async def use(peer, info):
        return info, await peer.answer([7, 8], 5), await peer.answer_all([[1], [5]], 2)

    info, one, both = planted(use)
    assert str(info) == "0.1.2, Q8_0, 2 threads, in process"
    assert (one.token_ids, one.first_tokens, len(one.came)) == ((9, 10, 11, 12, 13), 1, 5)
    assert [answered.token_ids for answered in both] == [(2, 3), (6, 7)]


def test_a_file_that_it_does_not_read_is_one_line(planted):
    with pytest.raises(PeerFailed, match=r"^openvino Q8_0: RuntimeError: Unsupported quantization type$"):
        planted(None, file_type="BF16")


def test_an_absent_peer_says_what_to_do(tmp_path):
    assert "pip install openvino-genai" in (absence(None) or "")
    assert absence(str(tmp_path / "python")) == f"no openvino: {tmp_path / 'python'} is no program"
    assert absence(sys.executable) is None

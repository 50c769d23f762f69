"""The comparison with the real vLLM, its CPU build, as the engine, and the shipped pair in float32: `make engines`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import vllm_peer
from tandem import compare
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import embedded_draft, find
from tandem.comparison.measuring.workloads import built_in_prompts
from tandem.comparison.vllm.settings import SERVED
from tests.vllm.test_real_vllm import ABSENT, PYTHON

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT)),
    pytest.mark.timeout(1800),
]


def test_every_way_of_vllm_gives_its_own_plain_text_and_its_counters_fit_what_came(tmp_path: Path) -> None:
    assert vllm_peer.absence(PYTHON) is None
    compare(
        built_in_prompts(per_workload=1)[:2],
        engine="vllm",
        vllm_python=PYTHON,
        vllm_args="--enforce-eager",
        architectures=tuple(SERVED),
        model=str(unpacked(find(None)).folder),
        draft_model=embedded_draft(),
        dtype="float32",
        rtts_ms=(0.0, 20.0),
        max_new_tokens=16,
        threads=1,
        output_dir=tmp_path,
    )
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert [len(condition["architectures"]) for condition in written["conditions"]] == [5, 5]
    for condition in written["conditions"]:
        for name, of in condition["architectures"].items():
            assert of["failed"] == 0 and of["identical_to_autoregressive"]["count"] == 2, name
    for record in written["records"]:
        # A step commits the accepted drafts and one token; the last may accept more than is asked for.
        surplus = record["rounds"] + record["accepted"] - record["output_tokens"]
        assert 0 <= surplus <= 3, record
        assert record["drafted"] == 0 if record["architecture"] == "autoregressive" else record["rounds"] > 0
    drafted = {name for name, of in written["conditions"][0]["architectures"].items() if of["accepted"]}
    assert drafted >= {"fused", "remote_draft", "never_waiting"}

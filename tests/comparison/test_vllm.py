"""Servers of vLLM in a comparison, with a server process of its API in their place."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.compare import main
from tandem.comparison.analysis.comparison import Comparison, read_comparison
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.vllm import AT_POSITION, DRAFTED, DRAFTS, parsed, stats_of
from tandem.comparison.measuring.workloads import given_prompts

FAKE = Path(__file__).with_name("fake_vllm.py")
URLS = {"autoregressive": "http://a:1", "lookup": "http://a:2"}


@contextlib.contextmanager
def running(drafts: int = 0, plan: str = "") -> Iterator[str]:
    """The URL of a server of vLLM that drafts so many tokens."""
    process = subprocess.Popen([sys.executable, "-S", FAKE, str(drafts), plan], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


def compared(folder: Path, **urls: str) -> Comparison:
    flags = ("--raw", "--prompt", "one", "--prompt", "two", "--max-new-tokens", "9", "--output-dir", str(folder))
    connect = [word for name, url in urls.items() for word in ("--connect", f"{name}={url}")]
    assert main((*flags, "--architectures", ",".join(urls), *connect)) == 0
    return read_comparison(folder / "comparison.json")


def test_servers_of_vllm_are_measured_with_their_own_counters(tmp_path: Path) -> None:
    with running() as plain, running(3) as ngram, running(3) as waiting:
        found = compared(tmp_path, autoregressive=plain, lookup=f"{ngram}/v1", remote_draft=waiting)
    of = {summary.architecture: summary for summary in found.base.summaries}
    # 9 tokens: one of the prompt, and 8 by one or by two
    rounds = {name: summary.acceptance.rounds for name, summary in of.items()}
    assert rounds == {"autoregressive": 18, "lookup": 10, "remote_draft": 10}
    assert (of["remote_draft"].acceptance.drafted, of["remote_draft"].acceptance.accepted) == (24, 8)
    assert of["lookup"].identical and of["lookup"].identical.count == 2
    (model,) = (endpoint.model for endpoint in found.endpoints if endpoint.architecture.name == "lookup")
    assert (model.backend, model.draft_name) == ("vLLM 0.0.fake", "its own n-gram")


def test_where_a_text_leaves_plain_vllm_s_is_said(tmp_path: Path) -> None:
    with running() as plain, running(3, "leaves") as ngram:
        found = compared(tmp_path, autoregressive=plain, lookup=ngram)
    lookup = found.base.of("lookup")
    assert lookup is not None and lookup.identical is not None
    same = lookup.identical
    assert (same.count, same.total, same.divergences[0].position) == (0, 2, 4)
    assert any("may be its own doing" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"architectures": ("autoregressive", "distributed")}, "connect: vLLM has no distributed"),
        ({"architectures": ("autoregressive", "fused")}, "connect: fused needs a URL as the others have"),
        ({"connect": {**URLS, "lookup": "a:1"}}, "connect: lookup needs a URL as the others have"),
        ({"mean_input_tokens": 8, "concurrency": (1,)}, "mean-input-tokens: servers of vLLM are not compared so"),
    ],
)
def test_what_is_not_measured_with_vllm_is_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"architectures": tuple(URLS), "connect": URLS, **wrong}
    with pytest.raises(ValueError, match=message):
        ComparisonConfig(prompts=given_prompts(["a"]), output_dir=tmp_path, **settings)


def test_positions_of_drafts_of_unknown_length_are_not_made_up() -> None:
    at = {(AT_POSITION, "0"): 4.0, (AT_POSITION, "1"): 2.0}
    even = stats_of({(DRAFTS, ""): 5.0, (DRAFTED, ""): 10.0, **at})
    assert (even.drafted_per_position, even.accepted_per_position) == ([5, 5], [4, 2])
    uneven = stats_of({(DRAFTS, ""): 5.0, (DRAFTED, ""): 9.0, **at})
    assert (uneven.drafted_per_position, uneven.accepted_per_position) == ([5], [4])


def test_a_page_that_is_no_page_of_counters_counts_nothing() -> None:
    assert parsed("<html>\nvllm:spec_decode_num_drafts_total{ 3\nother_total 4\nvllm:x_total nan\n") == {}
    two_engines = 'vllm:x_total{engine="0"} 1.0\nvllm:x_total{engine="1"} 2.0\n'
    assert parsed(two_engines) == {("vllm:x_total", ""): 3.0}

"""Calibrating requests: every length, spread over the prompts, and only where they can be used."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from tandem.comparison.measuring.calibration import SAMPLES, TOKENS, Calibration, Calibrator
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.run import Contender
from tandem.speculation.types import GenerationRequest, SamplingParams
from tests.comparison.fakes import FakeGenerator, prompt

REQUEST = GenerationRequest(text="", sampling=SamplingParams(seed=5), max_new_tokens=64, speculation_length=3)


def calibrated(
    names: list[str], prompts: int, fail_on: str | None = None
) -> tuple[list[Calibration], list[GenerationRequest]]:
    calls: list[tuple[str, GenerationRequest]] = []
    contenders = [Contender(name, FakeGenerator(name, calls=calls, fail_on=fail_on)) for name in names]
    found: list[Calibration] = []
    calibrator = Calibrator(contenders, REQUEST, (1, 2, 3, 4, 5), prompts, found.append)
    for number in range(prompts):
        asyncio.run(calibrator.after_prompt(prompt(f"p{number}")))
    return found, [request for _, request in calls]


def test_every_length_is_asked_for_often_enough_however_few_the_prompts() -> None:
    for prompts in (1, 4, 20):
        found, _ = calibrated(["autoregressive", "distributed", "fused"], prompts)
        counted = Counter((one.architecture, one.length) for one in found)
        for name in ("distributed", "fused"):
            assert all(counted[name, length] >= SAMPLES for length in range(1, 6))
        assert counted["autoregressive", 0] == prompts


def test_the_requests_are_short_and_otherwise_those_of_the_comparison() -> None:
    _, requests = calibrated(["autoregressive", "fused"], 2)
    assert {request.max_new_tokens for request in requests} == {TOKENS}
    assert {request.sampling.seed for request in requests} == {5}


def test_plain_decoding_and_drafts_of_known_cost_are_needed_for_a_prediction() -> None:
    def predicts(*names: str, **more: Any) -> bool:
        return ComparisonConfig((prompt("a"),), Path("nowhere"), names, **more).predicts

    assert predicts("autoregressive", "fused") and not predicts("autoregressive", "fused", speculation_length=0)
    assert not predicts("fused", "distributed") and not predicts("autoregressive", "lookup")


def test_a_request_that_fails_is_left_out() -> None:
    found, requests = calibrated(["autoregressive", "fused"], 2, fail_on="p0")
    assert requests and found
    assert len(found) == len(requests) // 2

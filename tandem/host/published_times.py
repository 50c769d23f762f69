"""Step times that others published, each with its source, to rehearse a device that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tandem.host.device_times import DeviceTimes, ModelTimes, StepTime, StepTimes, read_times

VLLM_NEURON = (
    "github.com/vllm-project/vllm-neuron, examples/vllm_neuron/models/{folder}, read in November 2026: TP 4, bfloat16,"
    " one request"
)
DRAFT_MS = 2.0
"""Assumed: nobody published the step of a draft model that runs elsewhere beside these targets."""
DRAFT_ASSUMED = f"the draft, {DRAFT_MS:g} ms a token"
DRAFT = ModelTimes("a small draft model", StepTimes((StepTime(DRAFT_MS),)))


def _trn2(name: str, model: str, folder: str, points: tuple[StepTime, ...], assumed: str) -> DeviceTimes:
    return DeviceTimes(
        name=name,
        device=f"trn2.3xlarge with {model}",
        source=VLLM_NEURON.format(folder=folder),
        target=ModelTimes(model, StepTimes(points)),
        draft=DRAFT,
        assumed=f"{assumed}; prompts, as steps of that many tokens; {DRAFT_ASSUMED}",
    )


PUBLISHED: Mapping[str, DeviceTimes] = MappingProxyType(
    {
        times.name: times
        for times in (
            _trn2(
                "trn2-llama-8b",
                "Llama-3.1-8B",
                "llama3/dflash/README.md",
                (StepTime(25.6, 1), StepTime(26.2, 4)),
                "steps of more than 4 tokens, 0.2 ms a token as from 1 to 4",
            ),
            _trn2(
                "trn2-qwen3-4b",
                "Qwen3-4B",
                "qwen3/dflash/README.md and run_tp4.sh",
                (StepTime(24.7, 1), StepTime(26.8, 4)),
                "steps of more than 4 tokens, 0.7 ms a token as from 1 to 4",
            ),
            DeviceTimes(
                name="h100-llama-8b",
                device="H100 80G with Llama-3.1-8B",
                source="docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance: Llama-3.1-8b-instruct, version 1.8.0,"
                " inter-token latency at concurrency 1, 5, 25 and 50",
                target=ModelTimes(
                    "Llama-3.1-8B-Instruct",
                    StepTimes((StepTime(4.63), StepTime(4.58, 1, 5), StepTime(5.19, 1, 25), StepTime(5.91, 1, 50))),
                ),
                draft=DRAFT,
                assumed="the format of weights was not seen (FP8 of the 70B on that page); a row of n tokens, as n rows"
                " of one; prompts, as steps of that many tokens; " + DRAFT_ASSUMED,
            ),
        )
    }
)


def times_named(given: str) -> DeviceTimes:
    """Returns the times of a preset, or those in a file. Raises ValueError, one line."""
    if given in PUBLISHED:
        return PUBLISHED[given]
    if not Path(given).is_file():
        raise ValueError(f"rehearse: {given!r} is neither a file nor one of {', '.join(PUBLISHED)}")
    try:
        return read_times(Path(given))
    except ValueError as error:
        raise ValueError(f"rehearse: {error}") from None

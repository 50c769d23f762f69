"""Runs in vLLM's environment: vLLM's engine, with requests that come as others end, and some that are cancelled.

A line with `prompts` is answered with their tokens, greedy and past ends of sequence. `at_once`: how many run.
`cancelled`: numbers of those that are cancelled once they have three tokens.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from line_worker import Answer, serve

COUNTED = ("vllm:spec_decode_", "vllm:num_preemptions")


def start(settings: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    import vllm

    began = time.perf_counter()
    engine = vllm.LLM(**settings, disable_log_stats=False).llm_engine
    said = {"version": vllm.__version__, "threads": 0, "dtype": str(engine.model_config.dtype)}
    return lambda asked: run(engine, **asked), said | {"startup_seconds": time.perf_counter() - began}


def run(
    engine: Any, prompts: list[list[int]], max_new_tokens: int, at_once: int, cancelled: list[int], **sampling: Any
) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = SamplingParams(
        **{"temperature": 0.0, **sampling},
        max_tokens=max_new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    tokens: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    waiting, under_way = list(tokens), set[int]()
    while waiting or under_way:
        while waiting and len(under_way) < at_once:
            number = waiting.pop(0)
            under_way.add(number)
            engine.add_request(str(number), {"prompt_token_ids": prompts[number]}, asked)
        for output in engine.step():
            number = int(output.request_id)
            tokens[number] = list(output.outputs[0].token_ids)
            if output.finished:
                under_way.discard(number)
            elif number in cancelled and len(tokens[number]) >= 3 and number in under_way:
                engine.abort_request([str(number)])
                under_way.discard(number)
    counted = {each.name: getattr(each, "values", None) or each.value for each in engine.get_metrics() if _counts(each)}
    return {"tokens": [tokens[number] for number in range(len(prompts))], "counted": counted}


def _counts(metric: Any) -> bool:
    return bool(metric.name.startswith(COUNTED))


if __name__ == "__main__":
    serve(start)

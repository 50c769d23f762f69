"""Runs vLLM behind line_worker.py, in its own Python environment."""

from __future__ import annotations

import time
from typing import Any

from line_worker import Answer, serve

SPECULATION = "vllm:spec_decode_"


def start(settings: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Creates vllm.LLM with `settings`; returns it and its description."""
    import torch
    import vllm

    began = time.perf_counter()
    engine = vllm.LLM(**settings).llm_engine
    said = {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "startup_seconds": time.perf_counter() - began,
    }
    return lambda asked: answer(engine, asked), said


def answer(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Answers prompts, or returns the engine's speculation counts."""
    return run(engine, asked["prompts"], asked["max_new_tokens"]) if "prompts" in asked else counted(engine)


def counted(engine: Any) -> dict[str, Any]:
    """Returns vLLM's speculation counters since its start; lists are by position. None without log stats."""
    metrics = engine.get_metrics() if engine.log_stats else ()
    mine = [metric for metric in metrics if metric.name.startswith(SPECULATION)]
    return {each.name.removeprefix(SPECULATION): getattr(each, "values", None) or each.value for each in mine}


def run(engine: Any, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Answers all prompts at once, greedily, ignoring ends of sequence; records each one's times."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    came: dict[str, list[float]] = {name: [] for name in tokens}
    first: dict[str, int] = {}
    began = time.perf_counter()
    for name, prompt in zip(tokens, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            name, new = output.request_id, list(output.outputs[0].token_ids)
            if new:
                came[name].append(time.perf_counter() - began)
                tokens[name] += new
                first.setdefault(name, len(tokens[name]))
    answers = [
        {"token_ids": tokens[name], "seconds": came[name][-1], "first_tokens": first[name], "came": came[name]}
        for name in tokens
    ]
    return {"answers": answers}


if __name__ == "__main__":
    serve(start)

"""Runs OpenVINO GenAI behind line_worker.py, in its own Python environment."""

from __future__ import annotations

import time
from typing import Any

from line_worker import Answer, serve


def start(settings: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Loads the GGUF file `model`; returns the engine and its description."""
    import openvino_genai as genai

    began = time.perf_counter()
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = settings["sequences"]
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False
    threads = {"INFERENCE_NUM_THREADS": settings["threads"]}
    pipeline = genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", threads)
    said = {
        "version": genai.__version__.split("-")[0],
        "threads": settings["threads"],
        "dtype": settings["file_type"],
        "startup_seconds": time.perf_counter() - began,
    }
    return lambda asked: run(pipeline, asked["prompts"], asked["max_new_tokens"]), said


def run(pipeline: Any, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Answers all prompts at once, greedily, ignoring ends of sequence; records token times."""
    import numpy
    import openvino
    import openvino_genai as genai

    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_new_tokens, True, False
    tokens: list[list[int]] = [[] for _ in prompts]
    came: list[list[float]] = [[] for _ in prompts]
    first = [0] * len(prompts)
    began = time.perf_counter()
    handles = [
        pipeline.add_request(i, openvino.Tensor(numpy.array([prompt], numpy.int64)), config)
        for i, prompt in enumerate(prompts)
    ]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for i, handle in enumerate(handles):
            while handle.can_read():
                new = [token for output in handle.read().values() for token in output.generated_ids]
                if new:
                    came[i].append(time.perf_counter() - began)
                    tokens[i] += new
                    first[i] = first[i] or len(new)
    return {
        "answers": [
            {"token_ids": tokens[i], "seconds": came[i][-1], "first_tokens": first[i], "came": came[i]}
            for i in range(len(prompts))
        ]
    }


if __name__ == "__main__":
    serve(start)

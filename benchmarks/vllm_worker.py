"""Runs vLLM as a process that answers lines, in its own Python environment and without importing Tandem.

The first line on stdin has the settings and is answered once the model is warm; each later line is a batch of prompts
to send at once. Lines are JSON objects both ways. Times are measured around the engine, without a server or a network.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    _end_with_parent()
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if answer is None:
                answer, reply = start(asked)
            else:
                reply = answer(asked)
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {said[0]}"}
        answers.write(json.dumps(reply) + "\n")


def _end_with_parent() -> None:
    """Asks Linux to end this process with its parent: closed stdin is noticed only between answers."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start(settings: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Creates the engine of vllm.LLM with `settings` and returns it with its description."""
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
    return lambda asked: run(engine, asked["prompts"], asked["max_new_tokens"]), said


def run(engine: Any, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Answers all prompts at once, greedily, ignoring ends of sequence; records when each was sent, began and ended."""
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
    main()

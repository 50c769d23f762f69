"""vLLM as a process that is asked by lines. Run by the Python of its own environment; imports nothing of Tandem.

The first line on stdin is the settings, answered once the model is warm; each later one a batch of prompts, sent at
once. One JSON object a line, both ways. Times are taken here, around the engine: no server and no wire is in them.
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
    # Whatever a library prints must not get between the answers.
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
    """An end of stdin is seen between answers only; a start takes minutes. Linux alone can do better."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start(settings: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """The engine of vllm.LLM with `settings`, and what it says of itself."""
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
    """All prompts at once, greedy, past any end of sequence; when each was sent, began to answer and was done."""
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

"""What NxD Inference's forward takes and gives, in shapes: recorded from its real code, compared with a stand-in.

A signature is what one kind of call looks like: the step (prefill or decode) of a kind of model, every keyword with
its shape and dtype, and of the output the fields that this backend reads. Sizes are B (rows), P (prompt), L (mask),
K (width of a window), V (vocabulary), or a number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_name("contract.json")
READ = (0, 3)
"""The items of `fused_outputs` that this backend reads."""


@contextmanager
def recorded(signatures: set[str], lines: int, width: int, vocabulary: int) -> Iterator[None]:
    """Adds the signature of every forward call of every model that is loaded meanwhile, with so many lines."""
    from tandem_nxdi import sdk

    plain = sdk.Application.__init__

    def wrapped(self: Any, module: Any, kind: Any, adapts: bool = False) -> None:
        forward = module.forward

        def call(**given: Any) -> Any:
            step = "prefill" if int(given["position_ids"].min()) == 0 else "decode"
            if len(given["input_ids"]) == (1 if step == "prefill" else lines):
                inputs = {name: _described(value, name, step, lines, width) for name, value in given.items()}
                output = forward(**given)
                found = {"model": kind.value, "step": step, "inputs": inputs}
                found["output"] = _output(output, step, lines, width, vocabulary)
                signatures.add(json.dumps(found, sort_keys=True))
                return output
            return forward(**given)

        module.forward = call
        plain(self, module, kind, adapts)

    sdk.Application.__init__ = wrapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        sdk.Application.__init__ = plain  # type: ignore[method-assign]


def _described(tensor: Any, name: str, step: str, lines: int, width: int) -> str:
    shape: list[object] = list(tensor.shape)
    if step == "decode" and shape[0] == lines:
        shape[0] = "B"
    if len(shape) == 2 and name != "sampling_params":
        if step == "prefill":
            shape[1] = "P"
        elif name == "attention_mask":
            shape[1] = "L"
        elif shape[1] == width:
            shape[1] = "K"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(shape)}"


def _output(output: Any, step: str, lines: int, width: int, vocabulary: int) -> dict[str, Any]:
    def shown(tensor: torch.Tensor) -> str:
        names = {width: "K", vocabulary: "V", **({lines: "B"} if step == "decode" else {})}
        return f"{tuple(names.get(size, size) for size in tensor.shape)}"

    fused = getattr(output, "fused_outputs", None)
    if fused is not None:
        return {"fused_outputs": {str(i): shown(fused[i]) for i in READ if step == "decode" or i == 0}}
    logits, tokens = output.logits, getattr(output, "tokens", None)
    if logits is not None:
        return {"logits": shown(logits)}
    return {"tokens": shown(tokens)}

"""A checked graph lowered to StableHLO, which neuronx-cc takes in, and run by another compiler that takes it in: XLA.

torch-mlir lowers it and jaxlib runs it on the CPU; both are the extra `graphs`. Neither is needed to serve.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.runners.graph_check import Captured, tensors


class NotLowered(RuntimeError):
    """An operation of a graph has no lowering."""


def missing() -> str | None:
    """Why nothing can be lowered here, or None."""
    for module, package in (("torch_mlir", "torch-mlir"), ("jax", "jax"), ("ml_dtypes", "jax")):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed: pip install -r requirements-graphs.txt"
    return None


def check_lowered(graphs: Mapping[str, Captured], dtype: torch.dtype, in_bfloat16: float | None = None) -> None:
    """XLA's results are torch's, in float32 to 1e-4 and to the integer.

    In bfloat16 many logits are nearly equal, and the two round differently, so another token may be the largest: it
    says that graphs run, and compares floating-point results of single steps within `in_bfloat16`, if that is given.
    """
    if why := missing():
        pytest.skip(f"steps pass the strict check; not lowered: {why}")
    for name, graph in graphs.items():
        functional = graph.functional()
        expected = list(tensors(functional(*[value.clone() for value in graph.inputs])))
        for ours, theirs in zip(executed(lowered(functional), graph.inputs), expected, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
            tolerance = 1e-4 if ours.is_floating_point() else 0.0
            if dtype is torch.bfloat16:
                if in_bfloat16 is None or not ours.is_floating_point() or "propose" in name or "fused" in name:
                    continue
                tolerance = in_bfloat16
            torch.testing.assert_close(
                ours, theirs, atol=tolerance, rtol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


def lowered(module: fx.GraphModule) -> str:
    """StableHLO of a graph that writes nothing in place (`Captured.functional`). Raises NotLowered."""
    from torch_mlir.fx import stateless_fx_import

    try:
        return str(stateless_fx_import(module, output_type="stablehlo"))
    except Exception as error:  # MLIR's passes raise one kind for whatever they met
        raise NotLowered(f"torch-mlir: {str(error).splitlines()[0]} (it says more on stderr)") from error


def executed(text: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What XLA makes of it."""
    import jax
    import numpy as np
    from jaxlib import xla_client

    device = jax.devices("cpu")[0]
    run = device.client.compile_and_load(text.encode(), xla_client.DeviceList((device,)), xla_client.CompileOptions())
    with jax.enable_x64(True):  # index types
        given = [jax.device_put(_to_numpy(value), device) for value in inputs]
    results = run.execute_sharded(given).disassemble_into_single_device_arrays()
    return [_to_torch(np.asarray(shards[0])) for shards in results]


def _to_numpy(value: Tensor) -> Any:
    import ml_dtypes

    value = value.detach().cpu()
    return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if value.dtype is torch.bfloat16 else value.numpy()


def _to_torch(value: Any) -> Tensor:
    import ml_dtypes
    import numpy as np

    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))

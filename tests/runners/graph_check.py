"""The strict check of graphs: what an ahead-of-time compiler for Trainium must be able to take, checked without one.

`StrictBackend` stands in for torch.compile's backend. It traces a step to ATen as TorchNeuron does (in-place updates of
arguments stay in the graph, where they become aliases of memory that stays on the device), looks at every node, and
runs the graph by plain torch, so that it can be held against module code. tests/runners/stablehlo.py takes it further
down.

A pass is necessary and not sufficient: neuronx-cc has limits of its own, of size above all.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem.runners.torch.graphs import BUCKETS_AT_MOST

aten = torch.ops.aten

# Each has a lowering: those of TorchNeuron's sources that are known, seen to lower to StableHLO by torch-mlir too.
_ALLOWED = """
_safe_softmax _softmax _to_copy _unsafe_view abs add alias amax amin argmax bitwise_and bitwise_not bitwise_or bmm cat
clamp clone constant_pad_nd copy copy_ cos cumsum detach div embedding eq exp expand full full_like gather ge gt
index_select isfinite le log logical_and logical_not logical_or lt maximum mean minimum mm mul ne neg permute pow
reciprocal repeat rsqrt scalar_tensor scatter select sigmoid silu sin slice split split_with_sizes squeeze stack sub
sum tanh topk unsqueeze view where zeros_like
"""
# What may make 64-bit integers: indices, which torch insists on, and what moves them. Arithmetic on them may not.
_INDICES = """
_to_copy alias argmax cat clone expand full gather index_select permute scalar_tensor select slice squeeze topk
unsqueeze view
"""
ALLOWED, INDICES = frozenset(_ALLOWED.split()), frozenset(_INDICES.split())
COLLECTIVES = frozenset({"all_gather_into_tensor", "all_reduce", "wait_tensor"})  # between ranks
ADDS = frozenset({"scatter_add", "scatter_reduce", "index_add", "index_put"})
REFUSED_TYPES = (torch.float64, torch.complex64, torch.complex128)


class GraphRejected(RuntimeError):
    """A step is not fit for an ahead-of-time compiler; the message names the operation and the rule."""


@dataclass(slots=True)
class Captured:
    """A step's graph in ATen, and its first run's arguments as they were before it (ranks have their group besides)."""

    module: fx.GraphModule
    inputs: list[Any] = field(default_factory=list)

    def functional(self) -> fx.GraphModule:
        """The graph with what it writes as further outputs in place of the writing."""
        module = copy.deepcopy(self.module)
        written = []
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target is aten.copy_.default:
                written.append(node.args[1])
                node.replace_all_uses_with(node.args[1])
                module.graph.erase_node(node)
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        output.args = ((*output.args[0], *written),)
        module.recompile()
        return module


class StrictBackend:
    """A backend for torch.compile that keeps every graph. What it raises, GraphRejected, dynamo wraps: see `reason`."""

    def __init__(self) -> None:
        self.graphs: list[Captured] = []

    def __call__(self, module: fx.GraphModule, example: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        # On Trainium attention with a mask is products and softmax; the CPU's own kernel would be a node of its own.
        with sdpa_kernel(SDPBackend.MATH):
            return aot_autograd(
                fw_compiler=self._compiled, decompositions=_decompositions(), keep_inference_input_mutations=True
            )(module, example)

    def _compiled(self, module: fx.GraphModule, example: Sequence[Any]) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]

        check_graph(module)
        captured = Captured(module)
        self.graphs.append(captured)

        def run(*given: Any) -> Any:
            if not captured.inputs:
                captured.inputs = [value.clone() if isinstance(value, Tensor) else value for value in given]
            return module.forward(*given)

        return make_boxed_func(run)


def checked(step: nn.Module, arguments: Sequence[Any]) -> Captured:
    """The graph of `step` for arguments like these, held against the module's own code. Raises GraphRejected."""
    backend, ours, theirs = StrictBackend(), copy.deepcopy(arguments), copy.deepcopy(arguments)
    run = torch.compile(step, fullgraph=True, dynamic=False, backend=backend)
    # Each bucket is another graph of one step's code, and dynamo counts them together.
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=BUCKETS_AT_MOST):
        try:
            results = run(*ours)
        except Exception as error:  # dynamo wraps what its backend raises, and has many errors of its own
            raise GraphRejected(reason(error)) from error
        with sdpa_kernel(SDPBackend.MATH):
            expected = step(*theirs)
    for name, one, other in (("result", results, expected), ("written argument", ours, theirs)):
        for i, (a, b) in enumerate(zip(tensors(one), tensors(other), strict=True)):
            if not torch.equal(a, b):
                raise GraphRejected(f"{name} {i} is not that of module code")
    (captured,) = backend.graphs
    return captured


def reason(error: BaseException) -> str:
    """The rule that was broken, out of whatever dynamo wrapped it in."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, GraphRejected):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return next((line for line in str(error).splitlines() if "GraphRejected" in line), str(error).splitlines()[0])


def tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested sequences."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors(value)


def check_graph(module: fx.GraphModule) -> None:
    """Raises GraphRejected at the first node that breaks a rule."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            _check_call(node)
        elif node.op == "output":
            _check_outputs(module.graph, node)
        elif node.op not in ("placeholder", "call_function", "get_attr"):
            raise GraphRejected(f"{node.op} {node.target}: not an operation of ATen")
        _check_value(node)


def _check_value(node: fx.Node) -> None:
    for value in _values(node):
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise GraphRejected(f"{_name(node)}: a number that is not known when compiling{_where(node)}")
        if not isinstance(value, Tensor):
            continue
        if any(not isinstance(size, int) for size in value.shape):
            raise GraphRejected(f"{_name(node)}: a symbolic shape, {list(value.shape)}{_where(node)}")
        if value.dtype in REFUSED_TYPES:
            raise GraphRejected(f"{_name(node)}: {value.dtype}{_where(node)}")
        if value.dtype is torch.int64 and (node.op == "placeholder" or _calls_beyond(node, INDICES)):
            raise GraphRejected(f"{_name(node)}: 64-bit integers other than indices{_where(node)}")


def _check_call(node: fx.Node) -> None:
    target = node.target
    name = _name(node)
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional" and name in COLLECTIVES:
        return
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise GraphRejected(f"{target}: not an operation of ATen{_where(node)}")
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise GraphRejected(f"{name}: makes random numbers{_where(node)}")
    if name in ADDS and any(isinstance(v, Tensor) and not v.dtype.is_floating_point for v in _values(node)):
        raise GraphRejected(f"{name}: adds integers at indices{_where(node)}")
    if name not in ALLOWED:
        raise GraphRejected(f"{name}: not among the operations that are known to compile{_where(node)}")
    if target is aten.copy_.default:
        _check_written(node)
    elif target._schema.is_mutable:
        raise GraphRejected(f"{name}: writes into what is no argument{_where(node)}")


def _check_written(node: fx.Node) -> None:
    """An argument's memory is given to its successor, so both must be alike."""
    into, value = node.args[:2]
    if not (isinstance(into, fx.Node) and into.op == "placeholder" and isinstance(value, fx.Node)):
        raise GraphRejected(f"copy_: writes into what is no argument{_where(node)}")
    old, new = into.meta["val"], value.meta["val"]
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise GraphRejected(f"copy_: {list(new.shape)} cannot take the place of {list(old.shape)}{_where(node)}")


def _check_outputs(graph: fx.Graph, output: fx.Node) -> None:
    """What is as large as an argument that keeps state must be that argument, written in place."""
    arguments = [v for node in graph.nodes if node.op == "placeholder" for v in _values(node) if isinstance(v, Tensor)]
    kept = {(tuple(v.shape), v.dtype) for v in arguments if v.dim() > 2}
    for node in output.all_input_nodes:
        for value in _values(node):
            if isinstance(value, Tensor) and (tuple(value.shape), value.dtype) in kept:
                raise GraphRejected(f"{_name(node)}: returns {list(value.shape)} that is not written in place")
            if isinstance(value, Tensor) and value.dtype is torch.int64:
                raise GraphRejected(f"{_name(node)}: returns 64-bit integers")


def _calls_beyond(node: fx.Node, names: frozenset[str]) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem and _name(node) not in names


def _values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def _name(node: fx.Node) -> str:
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else str(target)


def _where(node: fx.Node) -> str:
    """The line of code that it came from."""
    trace = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip(" ^~")]
    return f", at: {trace[-1]}" if trace else ""


def _decompositions() -> dict[Any, Any]:
    from torch._decomp import get_decompositions

    small: list[Any] = [aten.addmm, aten.rsub, aten.t, aten.transpose.int]
    return {**get_decompositions(small), aten.index_copy.default: _index_copy}


def _index_copy(into: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """As TorchNeuron does; torch's own decomposition is an index_put."""
    shape = [1] * into.dim()
    shape[dim] = -1
    return into.scatter(dim, index.reshape(shape).expand_as(source), source)

"""Builds the native runner of an EAGLE-3 head beside a native target, after checking its logits against the module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tandem.checkpoints.gguf_blocks import Blocks
from tandem.runners.eagle.hidden_states import TargetFeatures
from tandem.runners.eagle.module import EagleHead
from tandem.runners.eagle.remote import RemoteHead
from tandem.runners.native import NativeUnavailable
from tandem.runners.native.build import CannotBuild, library_path
from tandem.runners.native.head import NativeHead, NativeHeadRunner, linears
from tandem.runners.native.library import load_library
from tandem.runners.native.load import one_thread
from tandem.runners.native.model import NativeModel
from tandem.runners.native.reference import as_products
from tandem.runners.native.runner import NativeRunner
from tandem.runners.native.steps import DTYPES, NotNative, Threads
from tandem.runners.native.weights import UNQUANTISED, Packing, packing
from tandem.runners.protocol import TAIL, RunnerIdentity

if TYPE_CHECKING:
    from tandem.runners.loading import Execution

# How far native logits may be from the module's own, relative to their spread. One layer in bfloat16, or with inputs in
# 8 bits, is off by 0.008; a wrong matrix by 0.1 and more.
_DENSE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
_QUANTISED = 0.05
_PROBE = 12  # tokens


def load_native_head(
    head: EagleHead,
    features: TargetFeatures,
    embedding: Tensor,
    target: NativeRunner,
    execution: Execution,
    identity: RunnerIdentity,
) -> NativeHeadRunner:
    """Packs the head and checks its logits. Its steps share the target's threads, which wait for no others then.

    Overwrites features; comes before the target's first request. Raises NativeUnavailable.
    """
    dtype, packed = head_format(execution, _in_blocks(target))
    limits, threads = target.limits, target.model.threads
    try:
        head = copy.deepcopy(head).to(dtype=dtype)  # the module may be needed as it is
        most_tokens = limits.slots * TAIL + limits.chunk
        model = NativeHead(head, features, embedding, threads, most_tokens, packed)
        check_logits(model, head)
    except NotNative as error:
        raise NativeUnavailable(str(error)) from None
    name = packed.describe(str(dtype).removeprefix("torch."))
    return NativeHeadRunner(model, limits, replace(identity, dtype=name, backend="native"))


def load_remote_native_head(made: RemoteHead, execution: Execution, in_blocks: bool) -> NativeHeadRunner:
    """Packs a head that is away from its target, with room for the features that come, and checks its logits.

    `in_blocks`: its target runs so. Raises NativeUnavailable.
    """
    from tandem.runners.making import is_small

    dtype, packed = head_format(execution, in_blocks)
    small, limits = is_small(made.head), made.limits
    most_tokens = limits.slots * max(TAIL, limits.chunk) + limits.chunk  # a tail may have as many tokens as a chunk
    try:
        threads = Threads(load_library(library_path()), 1 if small else execution.threads or torch.get_num_threads())
        head, embedding = copy.deepcopy(made.head).to(dtype=dtype), _readable(made.embedding)
        features = made.features(embedding, head.fc.weight)
        model = NativeHead(head, features, embedding, threads, most_tokens, packed, made.length)
        check_logits(model, head)
    except (NotNative, CannotBuild, OSError) as error:
        raise NativeUnavailable(str(error)) from None
    identity = replace(made.identity, dtype=packed.describe(str(dtype).removeprefix("torch.")), backend="native")
    return NativeHeadRunner(model, limits, identity, made)


def _readable(embedding: Tensor) -> Tensor:
    """The embedding as the library reads it, which is its own dtype if that is one of DTYPES."""
    return embedding.to(embedding.dtype if embedding.dtype in DTYPES else torch.float32).contiguous()


def head_format(execution: Execution, in_blocks: bool) -> tuple[torch.dtype, Packing]:
    """The number format of a head's activations, and how its matrices are packed.

    They are what the flags say. Those of a target in blocks are int8 by default, for a step's time is that of reading
    matrices; other heads are in the dtype that is fastest here.
    """
    from tandem.runners.loading import choose_dtype

    weights, dtype = execution.weights, execution.number_format
    stays_dense = weights not in ("int8", "q4") and (dtype != "auto" or not in_blocks)
    if stays_dense:
        return choose_dtype(dtype, "cpu"), UNQUANTISED
    packed = packing(weights if weights in ("int8", "q4") else "int8")
    return choose_dtype("float32" if dtype == "auto" else dtype, "cpu"), packed


def _in_blocks(target: NativeRunner) -> bool:
    return isinstance(target.model, NativeModel) and target.model.packing.quantises


@torch.inference_mode()
def check_logits(model: NativeHead, head: EagleHead) -> float:
    """The distance of native logits from the module's, relative to their spread, after tokens with random features.

    Raises NotNative if it is above what the dtype allows.
    """
    chance, values = torch.Generator().manual_seed(0), model.features.values
    tokens = torch.randint(0, model.vocab_size, (_PROBE,), generator=chance)
    features = values[0, : _PROBE - 1]
    features.copy_(torch.randn(features.shape, generator=chance))
    try:
        model.feed([0], [0], [tokens[: _PROBE // 2].tolist()], 0)
        native = torch.from_numpy(model.feed([0], [_PROBE // 2], [tokens[_PROBE // 2 :].tolist()], 1))[0]
        with one_thread(), as_products(_packed(head, model.packing), model.library):
            own = _logits(head, model.embedding[tokens[1:]].to(model.dtype), features.to(model.dtype))
    finally:
        features.zero_()
    distance = float((native - own).norm() / (own - own.mean()).norm())
    if not distance <= (_QUANTISED if model.packing.quantises else _DENSE[model.dtype]):
        raise NotNative(f"the head's logits are {distance:.3g} away from the module's own")
    return distance


def _packed(head: EagleHead, packed: Packing) -> Iterator[tuple[Any, Blocks | None, int]]:
    """Every linear layer, and the format that it is quantised to."""
    for linear in (head.fc, *linears(head).values()):
        yield linear, None, packed.layers
    yield head.lm_head, None, packed.head


def _logits(head: EagleHead, embeds: Tensor, features: Tensor) -> Tensor:
    """float32 logits [draft vocabulary] after tokens with embeds [n, hidden] and features [n, 3 * target hidden]."""
    positions = torch.arange(len(embeds))[None]
    residual, q, k, v = head.project(embeds[None], head.fuse(features)[None], positions)
    attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return head.logits(head.finish(residual, attended))[0, -1].float()

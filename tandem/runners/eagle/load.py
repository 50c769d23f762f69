"""Loads a head, next to its target or alone. Raises one-line errors that name what does not fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.checkpoints.head_config import HeadConfig, read_head_config
from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import Checkpoint, CheckpointError, weights_revision
from tandem.runners.capabilities import No
from tandem.runners.loading import Execution, Shape, choose_dtype, prepared_platform
from tandem.runners.models import QUANTISED, in_own_format
from tandem.runners.protocol import Limits, Runner, RunnerIdentity
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import Platform, compile_order, platform_of

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")

log = logging.getLogger("tandem.engine")


def load_head(checkpoint: Checkpoint, target: Runner, startup: Startup, execution: Execution | None = None) -> Runner:
    """Loads the head of `checkpoint` for a loaded target; on the device thread. Raises ValueError, one line.

    Beside native steps it runs native too, in the format that `execution` asks for (None: the default one).
    """
    from tandem.runners.eagle.files import read_head
    from tandem.runners.eagle.hidden_states import TargetFeatures
    from tandem.runners.eagle.runner import EagleRunner
    from tandem.runners.native import NativeUnavailable
    from tandem.runners.native.load_head import load_native_head
    from tandem.runners.native.runner import NativeRunner
    from tandem.runners.torch.graph_runner import GraphRunner

    folder = Path(checkpoint.folder)
    with startup.stage("loading"):
        head, own_embedding = read_head(folder)
    config = head.config
    out = target.capabilities.features_out
    assert not isinstance(out, No), "the engine asked"
    layers = config.taps(out.layer_count)
    _check_vocabulary(folder, config, target)
    features = out.hand_out(layers)
    assert isinstance(features, TargetFeatures)
    if features.values.shape[2] != len(layers) * config.target_hidden_size:
        hidden = features.values.shape[2] // len(layers)
        raise CheckpointError(
            f"{folder}: made for a hidden size of {config.target_hidden_size}, the target's is {hidden}"
        )
    embedding = features.embedding if own_embedding is None else own_embedding.to(features.embedding)
    if embedding.shape[1] != config.hidden_size:
        raise CheckpointError(f"{folder}: without embed_tokens it needs the target's hidden size, {embedding.shape[1]}")
    platform, dtype = platform_of(target.identity.device), str(features.values.dtype).removeprefix("torch.")
    identity = _identity(checkpoint, dtype, platform)
    if isinstance(target, NativeRunner):
        try:
            with startup.stage("packing"):
                return load_native_head(head, features, embedding, target, execution or Execution(), identity)
        except NativeUnavailable as error:
            log.info("%s runs as module code: %s", checkpoint.name, error)
    head = head.to(device=features.values.device, dtype=features.values.dtype)
    beside = target if isinstance(target, GraphRunner) else None
    return EagleRunner(head, features, embedding, target.limits, identity, platform, beside=beside)


def load_remote_head(
    checkpoint: Checkpoint, target: Checkpoint, execution: Execution, shape: Shape, startup: Startup
) -> Runner:
    """Loads the head of `checkpoint` alone; of its target only the embedding is read, if the head has none of its own.

    On the device thread. Where native steps are available, the head runs in them, in the format that `execution` asks
    for; by default in int8 if the target runs in blocks. Raises ValueError, one line.
    """
    import torch

    from tandem.runners.eagle.files import read_head
    from tandem.runners.eagle.remote import RemoteHead
    from tandem.runners.eagle.runner import EagleRunner
    from tandem.runners.native import NativeUnavailable
    from tandem.runners.native.load_head import load_remote_native_head

    folder, platform = Path(checkpoint.folder), prepared_platform(execution)
    with startup.stage("loading"):
        head, embedding = read_head(folder)
        own = embedding is not None
        embedding = embedding if embedding is not None else _target_embedding(folder, target)
    config = head.config
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise CheckpointError(
            f"{folder}: needs an embedding of {config.vocab_size} by {config.hidden_size}, and that of {target.name} is"
            f" {' by '.join(map(str, embedding.shape))}; --target_model names the target that the head was made for"
        )
    dtype = choose_dtype(execution.number_format, platform.name)
    if execution.threads:
        torch.set_num_threads(execution.threads)
    identity = _identity(checkpoint, str(dtype).removeprefix("torch."), platform)
    chunk = min(shape.chunk, shape.max_length)
    limits = Limits(shape.slots, shape.max_length, shape.max_draft, chunk, config.vocab_size)
    read = "" if own else weights_revision(target)
    made = RemoteHead(head, config.taps(_layer_count(target)), embedding, limits, identity, read)
    if platform.name == "cpu" and "native" in (order := compile_order(execution.compile, platform)):
        in_blocks = in_own_format(execution, target, order).weights in QUANTISED
        try:
            with startup.stage("packing"):
                return load_remote_native_head(made, execution, in_blocks)
        except NativeUnavailable as error:
            log.info("%s runs as module code: %s", checkpoint.name, error)
    return EagleRunner.elsewhere(made, dtype, platform)


def _target_embedding(folder: Path, target: Checkpoint) -> Tensor:
    """The target's embedding [vocabulary, hidden], read alone from its folder. Raises CheckpointError."""
    from tandem.checkpoints.tensors import Tensors

    needs = f"{folder} has no embed_tokens, so the draft side needs the target's: name its folder with --target_model"
    try:
        tensors = Tensors(Path(target.folder))
    except CheckpointError as error:
        raise CheckpointError(f"draft: {needs} ({error})") from None
    for name in _EMBEDDINGS:
        if name in tensors.files:
            return tensors[name]
    raise CheckpointError(f"draft: {needs}; {target.folder} has none of {', '.join(_EMBEDDINGS)}")


def _layer_count(target: Checkpoint) -> int:
    """Decoder layers of the target, by its config.json. Raises CheckpointError."""
    file = Path(target.folder) / "config.json"
    try:
        count = read_object(file)["num_hidden_layers"]
    except (OSError, ValueError, KeyError):
        raise CheckpointError(f"{file}: does not say how many layers the target has (num_hidden_layers)") from None
    if type(count) is not int or count < 1:
        raise CheckpointError(f"{file}: num_hidden_layers: {count!r} is not a number above 0")
    return count


def _identity(checkpoint: Checkpoint, dtype: str, platform: Platform) -> RunnerIdentity:
    return RunnerIdentity(
        model_name=checkpoint.name,
        weights_revision=weights_revision(checkpoint),
        dtype=dtype,
        device=platform.name,
        backend="torch",
    )


def expect_head(checkpoint: Checkpoint, target: Runner) -> None:
    """Makes the graphs of a target that is not warm yet hand out what the head of `checkpoint` reads.

    Other targets need not know ahead. Raises ValueError, one line.
    """
    from tandem.runners.torch.graph_runner import GraphRunner

    if isinstance(target, GraphRunner):
        folder = Path(checkpoint.folder)
        config = read_head_config(folder)
        _check_vocabulary(folder, config, target)
        target.hand_out(config.taps(target.model.layer_count))


def _check_vocabulary(folder: Path, config: HeadConfig, target: Runner) -> None:
    if config.vocab_size != target.limits.vocab_size:
        raise CheckpointError(
            f"{folder}: made for a vocabulary of {config.vocab_size}, the target's is {target.limits.vocab_size}"
        )

"""Loads a head next to its target. Raises one-line errors that name what does not fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.checkpoints.head_config import HeadConfig, read_head_config
from tandem.checkpoints.locate import Checkpoint, CheckpointError, weights_revision
from tandem.runners.eagle.features import HandsOutFeatures
from tandem.runners.protocol import Runner, RunnerIdentity
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import platform_of

if TYPE_CHECKING:
    from tandem.runners.loading import Execution

SHARED = (
    "draft: an EAGLE head needs the target's hidden states, which a target shared by several processes does not hand"
    " out; leave --tp_degree out, or use --draft model"
)

log = logging.getLogger("tandem.engine")


def load_head(checkpoint: Checkpoint, target: Runner, startup: Startup, execution: Execution | None = None) -> Runner:
    """Loads the head of `checkpoint` for a loaded target; on the device thread. Raises ValueError, one line.

    Beside native steps it runs native too, in the format that `execution` asks for (None: the default one).
    """
    if not isinstance(target, HandsOutFeatures):
        raise ValueError(SHARED)
    from tandem.runners.eagle.files import read_head
    from tandem.runners.eagle.runner import EagleRunner
    from tandem.runners.loading import Execution
    from tandem.runners.native import NativeUnavailable
    from tandem.runners.native.load_head import load_native_head
    from tandem.runners.native.runner import NativeRunner
    from tandem.runners.torch.graph_runner import GraphRunner

    folder = Path(checkpoint.folder)
    with startup.stage("loading"):
        head, own_embedding = read_head(folder)
    config = head.config
    layers = config.taps(target.layer_count)
    _check_vocabulary(folder, config, target)
    features = target.hand_out(layers)
    if features.values.shape[2] != len(layers) * config.target_hidden_size:
        hidden = features.values.shape[2] // len(layers)
        raise CheckpointError(
            f"{folder}: made for a hidden size of {config.target_hidden_size}, the target's is {hidden}"
        )
    embedding = features.embedding if own_embedding is None else own_embedding.to(features.embedding)
    if embedding.shape[1] != config.hidden_size:
        raise CheckpointError(f"{folder}: without embed_tokens it needs the target's hidden size, {embedding.shape[1]}")
    platform, dtype = platform_of(target.identity.device), str(features.values.dtype).removeprefix("torch.")
    identity = RunnerIdentity(
        model_name=checkpoint.name,
        weights_revision=weights_revision(checkpoint),
        dtype=dtype,
        device=platform.name,
        backend="torch",
        refeeds=True,
    )
    if isinstance(target, NativeRunner):
        try:
            with startup.stage("packing"):
                return load_native_head(head, features, embedding, target, execution or Execution(), identity)
        except NativeUnavailable as error:
            log.info("%s runs as module code: %s", checkpoint.name, error)
    head = head.to(device=features.values.device, dtype=features.values.dtype)
    made = (head, features, embedding, target.limits, identity, platform)
    if isinstance(target, GraphRunner):
        from tandem.runners.eagle.graph_runner import EagleGraphRunner

        return EagleGraphRunner(*made, target)
    return EagleRunner(*made)


def expect_head(checkpoint: Checkpoint, target: Runner) -> None:
    """Makes the graphs of a target that is not warm yet hand out what the head of `checkpoint` reads.

    Other targets need not know ahead. Raises ValueError, one line.
    """
    from tandem.runners.torch.graph_runner import GraphRunner

    if isinstance(target, GraphRunner):
        if target.model.ranks > 1:
            raise ValueError(SHARED)
        folder = Path(checkpoint.folder)
        config = read_head_config(folder)
        _check_vocabulary(folder, config, target)
        target.hand_out(config.taps(target.layer_count))


def _check_vocabulary(folder: Path, config: HeadConfig, target: Runner) -> None:
    if config.vocab_size != target.limits.vocab_size:
        raise CheckpointError(
            f"{folder}: made for a vocabulary of {config.vocab_size}, the target's is {target.limits.vocab_size}"
        )

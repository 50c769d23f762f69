"""Loads a head, next to its target or alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.gguf_blocks import StoredWeights
from tandem.checkpoints.head_config import HeadConfig, HeadWeights, read_head_config, read_head_weights
from tandem.checkpoints.hub_files import need
from tandem.checkpoints.json_files import read_object
from tandem.checkpoints.locate import Checkpoint, CheckpointError, weights_revision
from tandem.checkpoints.numbers import Stored
from tandem.checkpoints.tensors import Tensors
from tandem.runners.capabilities import FeaturesIn, HandedOut, No
from tandem.runners.load_runner import QUANTISED, Execution, Shape, dtype_name, in_own_format, prepared_platform
from tandem.runners.native import NativeUnavailable
from tandem.runners.native.steps import NativeFeatures
from tandem.runners.protocol import Limits, Runner, RunnerIdentity
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import Platform, compile_order, platform_of
from tandem.speculation.features import FeatureInbox

_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")

log = logging.getLogger("tandem.engine")


@dataclass(frozen=True, slots=True)
class RemoteHead:
    """embedding [vocabulary, hidden]: the head's own, or of the target of `weights_revision_read`."""

    head: HeadWeights
    layers: tuple[int, ...]
    embedding: Stored
    limits: Limits
    identity: RunnerIdentity
    weights_revision_read: str

    @property
    def length(self) -> int:
        """Positions of a slot, drafts included."""
        return self.limits.max_length + self.limits.max_draft + 1

    @property
    def features_shape(self) -> tuple[int, int, int]:
        """Slots, positions, numbers."""
        return self.limits.slots, self.length, len(self.layers) * self.head.config.target_hidden_size

    def reads(self, follow: Callable[[int, FeatureInbox], None]) -> FeaturesIn:
        return FeaturesIn(self.layers, self.head.config.target_hidden_size, self.weights_revision_read, follow)


def load_head(checkpoint: Checkpoint, target: Runner, startup: Startup, execution: Execution | None = None) -> Runner:
    """Loads a head for a loaded target, native if that is; on the device thread. Raises ValueError, one line."""
    folder = Path(checkpoint.folder)
    with startup.stage("loading"):
        head, own_embedding = read_head_weights(folder)
    config = head.config
    out = target.capabilities.features_out
    assert not isinstance(out, No), "the engine asked"
    layers = config.taps(out.layer_count)
    _check_vocabulary(folder, config, target)
    features = out.hand_out(layers)
    if out.hidden_size != config.target_hidden_size:
        raise CheckpointError(
            f"{folder}: made for a hidden size of {config.target_hidden_size}, the target's is {out.hidden_size}"
        )
    width = out.hidden_size if own_embedding is None else own_embedding.shape[1]
    if width != config.hidden_size:
        raise CheckpointError(f"{folder}: without embed_tokens it needs the target's hidden size, {width}")
    platform = platform_of(target.identity.device)
    if isinstance(features, NativeFeatures):
        from tandem.runners.native.head import load_native_head
        from tandem.runners.native.native_runner import NativeRunner

        assert isinstance(target, NativeRunner)
        embedding = features.embedding if own_embedding is None else own_embedding.to(target.model.dtype).own()
        identity = _identity(checkpoint, target.model.dtype, platform)
        try:
            with startup.stage("packing"):
                return load_native_head(head, features, embedding, target, execution or Execution(), identity)
        except NativeUnavailable as error:
            _as_module_code(checkpoint, error)
    return _load_module_code(checkpoint, head, features, own_embedding, target, platform)


def _load_module_code(
    checkpoint: Checkpoint,
    weights: HeadWeights,
    handed: HandedOut,
    own_embedding: Stored | None,
    target: Runner,
    platform: Platform,
) -> Runner:
    from tandem.runners.eagle.eagle_runner import EagleRunner
    from tandem.runners.eagle.hidden_states import TargetFeatures, of_native, tensor_of
    from tandem.runners.eagle.module import head_module
    from tandem.runners.torch.graph_runner import GraphRunner

    if isinstance(handed, NativeFeatures):
        handed = of_native(handed)
    assert isinstance(handed, TargetFeatures)
    own = None if own_embedding is None else tensor_of(own_embedding)
    embedding = handed.embedding if own is None else own.to(handed.embedding)
    like = handed.values
    head = head_module(Path(checkpoint.folder), weights).to(device=like.device, dtype=like.dtype)
    identity = _identity(checkpoint, str(like.dtype).removeprefix("torch."), platform)
    beside = target if isinstance(target, GraphRunner) else None
    return EagleRunner(head, handed, embedding, target.limits, identity, platform, beside=beside)


def load_remote_head(
    checkpoint: Checkpoint, target: Checkpoint, execution: Execution, shape: Shape, startup: Startup
) -> Runner:
    """Loads a head alone, native if available, on the device thread. Raises ValueError, one line."""
    folder, platform = Path(checkpoint.folder), prepared_platform(execution)
    with startup.stage("loading"):
        head, embedding = read_head_weights(folder)
        own = embedding is not None
        embedding = embedding if embedding is not None else _target_embedding(folder, target)
    config = head.config
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise CheckpointError(
            f"{folder}: needs an embedding of {config.vocab_size} by {config.hidden_size}, and that of {target.name} is"
            f" {' by '.join(map(str, embedding.shape))}; --target_model names the target that the head was made for"
        )
    dtype = dtype_name(execution.number_format, platform.name)
    chunk = min(shape.chunk, shape.max_length)
    limits = Limits(shape.slots, shape.max_length, shape.max_draft, chunk, config.vocab_size)
    read, identity = "" if own else weights_revision(target), _identity(checkpoint, dtype, platform)
    made = RemoteHead(head, config.taps(_layer_count(target)), embedding, limits, identity, read)
    if platform.name == "cpu" and "native" in (order := compile_order(execution.compile, platform)):
        from tandem.runners.native.head import load_remote_native_head

        in_blocks = in_own_format(execution, target, order).weights in QUANTISED
        try:
            with startup.stage("packing"):
                return load_remote_native_head(made, execution, in_blocks)
        except NativeUnavailable as error:
            _as_module_code(checkpoint, error)
    need(f"{checkpoint.name}: compile {execution.compile} on {platform.name}", "torch", "transformers")
    import torch

    from tandem.runners.eagle.eagle_runner import EagleRunner

    if execution.threads:
        torch.set_num_threads(execution.threads)
    return EagleRunner.elsewhere(folder, made, getattr(torch, dtype), platform)


def _as_module_code(checkpoint: Checkpoint, error: NativeUnavailable) -> None:
    log.info("%s runs as module code: %s", checkpoint.name, error)
    need(f"{checkpoint.name} runs without native steps ({error}), and module code", "torch", "transformers")


def _target_embedding(folder: Path, target: Checkpoint) -> Stored:
    needs = f"{folder} has no embed_tokens, so the draft side needs the target's: name its folder with --target_model"
    try:
        if target.gguf_file:
            return StoredWeights(target.gguf_file).stored("token_embd.weight")
        tensors = Tensors(Path(target.folder))
    except CheckpointError as error:
        raise CheckpointError(f"draft: {needs} ({error})") from None
    for name in _EMBEDDINGS:
        if name in tensors.files:
            return tensors.stored(name)
    raise CheckpointError(f"draft: {needs}; {target.folder} has none of {', '.join(_EMBEDDINGS)}")


def _layer_count(target: Checkpoint) -> int:
    file = target.gguf_file or Path(target.folder) / "config.json"
    try:
        values = StoredWeights(file).header.values if target.gguf_file else read_object(file)
        count = values[f"{values['general.architecture']}.block_count" if target.gguf_file else "num_hidden_layers"]
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
    """Makes a cold target's graphs hand out what the head reads. Raises ValueError, one line."""
    if target.identity.backend == "native":
        return
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

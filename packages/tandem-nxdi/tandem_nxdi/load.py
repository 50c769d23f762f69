"""Loads NxDI runners; checks everything before anything compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.eagle_heads import check_completed
from tandem.checkpoints.head_config import is_head
from tandem.checkpoints.locate import Checkpoint, CheckpointError, weights_revision
from tandem.runners.protocol import Limits, Runner, RunnerIdentity
from tandem_nxdi.adapters import NxdiAdapters, read_adapters
from tandem_nxdi.artifacts import CompiledFolder, compiled
from tandem_nxdi.availability import require_nxdi, versions
from tandem_nxdi.build import Build, BuildRequest, Kind, plan_build
from tandem_nxdi.checkpoint import ModelFacts, facts, text_config
from tandem_nxdi.fused import FusedDraft, FusedRunner
from tandem_nxdi.quantisation import check_target, fp8_environment, with_draft_kept
from tandem_nxdi.runner import NxdiRunner
from tandem_nxdi.settings import NxdiSettings
from tandem_nxdi.store import check_store, publish

if TYPE_CHECKING:
    from tandem.runners.loading import Execution, Shape
    from tandem_nxdi.sdk import Application

log = logging.getLogger("tandem.engine")
_CONTEXT_KERNELS = ("attn_kernel_enabled", "mlp_kernel_enabled", "quantized_mlp_kernel_enabled")
_SHORT_BUCKET = 1024  # tokens

Start = Callable[[Build, ModelFacts, ModelFacts | None, CompiledFolder], "Application"]


def load_nxdi(
    checkpoint: Checkpoint, execution: Execution, shape: Shape, settings: NxdiSettings, verifies: bool, start: Start
) -> Runner:
    """Loads a target (`verifies`) or a draft. Raises CheckpointError or ValueError, one line."""
    build, own, wanted = _planned(checkpoint, execution, shape, settings, verifies)
    device = start(build, own, None, wanted)
    limits = _limits(build, shape, own)
    identity = _identity(checkpoint, own, device.dtype)
    exact, adapters = execution.exact, NxdiAdapters(build.adapters)
    return NxdiRunner(device, build.layout, limits, identity, verifies, exact, build.tokens_only, adapters)


def load_nxdi_pair(
    target: Checkpoint, draft: Checkpoint, execution: Execution, shape: Shape, settings: NxdiSettings, start: Start
) -> tuple[FusedRunner, FusedDraft]:
    """Loads a pair as one graph. Raises CheckpointError or ValueError."""
    build, own, other, wanted = _planned_pair(target, draft, execution, shape, settings)
    device = start(build, own, other, wanted)
    limits = _limits(build, shape, own)
    runner = FusedRunner(
        device, build.layout, limits, _identity(target, own, device.dtype), True, execution.exact, True
    )
    return runner, FusedDraft(runner, _identity(draft, other, device.dtype))


def compile_nxdi(
    checkpoint: Checkpoint, execution: Execution, shape: Shape, settings: NxdiSettings, verifies: bool
) -> str:
    """Compiles for `load_nxdi`, and publishes to the store if any. Returns a line for the log."""
    build, own, wanted = _planned(checkpoint, execution, shape, settings, verifies)
    return _compiled(build, own, None, wanted)


def compile_nxdi_pair(
    target: Checkpoint, draft: Checkpoint, execution: Execution, shape: Shape, settings: NxdiSettings
) -> str:
    """Compiles for `load_nxdi_pair`."""
    return _compiled(*_planned_pair(target, draft, execution, shape, settings))


def _compiled(build: Build, own: ModelFacts, draft: ModelFacts | None, wanted: CompiledFolder) -> str:
    from tandem_nxdi.sdk import compile_only

    if wanted.store is not None:
        check_store(wanted.store)
    line = f"{wanted.folder.name}: {'compiled' if compile_only(build, own, draft, wanted) else 'there already'}"
    if wanted.store is None:
        return f"{line}, in {wanted.folder.parent}"
    published = publish(wanted.folder, wanted.made_from, wanted.store)
    return f"{line}, {'published to' if published else 'in'} {wanted.store}"


def _planned(
    checkpoint: Checkpoint, execution: Execution, shape: Shape, settings: NxdiSettings, verifies: bool
) -> tuple[Build, ModelFacts, CompiledFolder]:
    kind = Kind.WINDOW if verifies and shape.max_draft else Kind.PLAIN
    adapters = read_adapters(settings.adapters) if verifies else ()
    build = plan_build(_request(kind, execution, shape), settings, adapters)
    own = facts(checkpoint, build.max_length)
    check_target(build, own)
    _warn_of_short_buckets(build)
    return build, own, _wanted(build, checkpoint, own, None, settings)


def _planned_pair(
    target: Checkpoint, draft: Checkpoint, execution: Execution, shape: Shape, settings: NxdiSettings
) -> tuple[Build, ModelFacts, ModelFacts, CompiledFolder]:
    eagle3 = is_head(Path(draft.folder))
    if eagle3 and not settings.eagle:
        raise CheckpointError(f"{draft.folder}: an EAGLE-3 head: with NxD Inference it drafts by --draft model --eagle")
    request = replace(_request(Kind.FUSED, execution, shape), eagle3=eagle3)
    build = plan_build(request, settings, read_adapters(settings.adapters))
    if build.eagle:
        normed = bool((build.draft or {}).get("enable_eagle_draft_input_norm"))
        check_completed(Path(draft.folder), text_config(Path(target.folder)), normed)
    own, other = facts(target, build.max_length), facts(draft, build.max_length)
    if own.vocab_size != other.vocab_size:
        raise CheckpointError(
            f"{other.folder}: {other.vocab_size} token ids, the target has {own.vocab_size}; a fused graph has one"
        )
    check_target(build, own)
    _warn_of_short_buckets(build)
    build = with_draft_kept(build, other)
    return build, own, other, _wanted(build, target, own, (draft, other), settings)


def start_on_device(build: Build, target: ModelFacts, draft: ModelFacts | None, wanted: CompiledFolder) -> Application:
    """Compiles if necessary and loads. Raises ValueError without NxD Inference."""
    require_nxdi()
    from tandem_nxdi.sdk import start

    return start(build, target, draft, wanted)


def _warn_of_short_buckets(build: Build) -> None:
    # AWS's tutorial of Llama-3.1-405B: kernels with short context buckets give a "Numerical Error".
    kernels = [name for name in _CONTEXT_KERNELS if build.neuron.get(name)]
    short = [chunk for chunk in build.layout.chunks if chunk < _SHORT_BUCKET]
    if kernels and short:
        log.warning(
            "neuron_config: %s with context buckets of %d tokens and less: AWS warns of numerical errors; give "
            "context_encoding_buckets that begin at 2048",
            *(", ".join(kernels), _SHORT_BUCKET),
        )


def _request(kind: Kind, execution: Execution, shape: Shape) -> BuildRequest:
    dtype = None if execution.dtype == "auto" else execution.dtype
    return BuildRequest(kind, shape.slots, shape.max_length, shape.max_draft, dtype)


def _limits(build: Build, shape: Shape, own: ModelFacts) -> Limits:
    return Limits(shape.slots, build.max_length, shape.max_draft, build.layout.chunks[-1], own.vocab_size)


def _identity(checkpoint: Checkpoint, own: ModelFacts, dtype: str) -> RunnerIdentity:
    return RunnerIdentity(checkpoint.name, weights_revision(checkpoint), dtype, "neuron", "nxdi", own.end_ids)


def _wanted(
    build: Build,
    checkpoint: Checkpoint,
    own: ModelFacts,
    draft: tuple[Checkpoint, ModelFacts] | None,
    settings: NxdiSettings,
) -> CompiledFolder:
    made_from: dict[str, Any] = {
        "what": f"compiled by NxD Inference for Tandem: {build.kind.value}{' with EAGLE' if build.eagle else ''}",
        "target": _source(checkpoint, own),
        "neuron_config": dict(build.neuron),
        "sdk": versions(),
    }
    if build.adapters:
        made_from |= {"adapters": dict(build.adapters)}
    if variables := fp8_environment(build.neuron):
        made_from |= {"environment": variables}
    if draft is not None:
        made_from |= {"draft": _source(*draft), "draft_neuron_config": dict(build.draft or {})}
    name = f"{checkpoint.name.replace('/', '--')}-{build.kind.value}"
    return compiled(settings.compiled_dir, name, made_from, settings.artifacts)


def _source(checkpoint: Checkpoint, own: ModelFacts) -> Mapping[str, str]:
    return {"name": checkpoint.name, "weights": weights_revision(checkpoint), "config": own.digest}

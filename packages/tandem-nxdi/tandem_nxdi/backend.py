"""Registers NxD Inference as a backend: loads and compiles models, with everything checked before anything compiles."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
from tandem.checkpoints.convert import check_completed
from tandem.checkpoints.head_config import is_head
from tandem.checkpoints.locate import Checkpoint, CheckpointError, find, weights_revision
from tandem.host.cores import format_cores, parse_cores
from tandem.host.detect import DOCTOR, missing
from tandem.host.packages import clashes, distributions, installed_package, installed_packages, refusal
from tandem.runners.backends import Backend, LoadRequest
from tandem.runners.protocol import Limits, Runner, RunnerIdentity
from tandem.runners.startup import Startup
from tandem_nxdi.adapters import NxdiAdapters, read_adapters
from tandem_nxdi.checkpoint import ModelFacts, facts, local, text_config
from tandem_nxdi.compiled import CompiledModel, check_store, compiled_model
from tandem_nxdi.fused import FusedDraft, FusedRunner
from tandem_nxdi.nxdi_runner import NxdiRunner
from tandem_nxdi.nxdi_settings import NxdiSettings, apart, draft_apart
from tandem_nxdi.quantisation import check_target, fp8_environment, with_draft_kept
from tandem_nxdi.shapes import Build, kind_of, plan_build

if TYPE_CHECKING:
    from tandem_nxdi.sdk import Application

log = logging.getLogger("tandem.engine")
VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
BESIDE = "draft: with NxD Inference a head drafts in one graph with its target: fused_target --draft model --eagle"
_CONTEXT_KERNELS = ("attn_kernel_enabled", "mlp_kernel_enabled", "quantized_mlp_kernel_enabled")
_SHORT_BUCKET = 1024  # tokens
PACKAGES = ("neuronx-distributed-inference", "neuronx-distributed", "torch-neuronx")
ALSO = ("neuronx-cc", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What is compiled and loaded. `draft`: in one graph with the target."""

    build: Build
    target: ModelFacts
    draft: ModelFacts | None
    wanted: CompiledModel

    def start(self) -> Application:
        """Compiles if necessary and loads. Raises ValueError without NxD Inference."""
        require_nxdi()
        from tandem_nxdi.sdk import start

        return start(self.build, self.target, self.draft, self.wanted)


class NxdiBackend(Backend):
    """Loads a pair in one process as one graph."""

    loads_pairs = True

    def require(self) -> None:
        require_nxdi()

    def find(self, model: str | None) -> Checkpoint:
        # NxDI shards weights from a folder, so a hub id is downloaded.
        return local(find(model))

    def adapter(self, choice: AdapterChoice) -> Adapter:
        return read_adapters([choice])[0]  # NxDI reads adapters itself

    def draft_has_tokenizer(self, request: LoadRequest) -> bool:
        return not _settings(request).eagle  # an EAGLE head has none

    def load(self, checkpoint: Checkpoint, request: LoadRequest, startup: Startup) -> Runner:
        take_cores(request)
        with startup.stage("loading"):
            planned = plan(checkpoint, None, request)
            device, build = planned.start(), planned.build
            own = (_limits(planned, request), _identity(checkpoint, planned.target, device))
            exact, adapters = request.execution.exact, NxdiAdapters(build.adapters)
            return NxdiRunner(device, build.layout, *own, request.verifies, exact, build.tokens_only, adapters)

    def load_pair(
        self, target: Checkpoint, draft: Checkpoint, request: LoadRequest, startup: Startup
    ) -> tuple[Runner, Runner]:
        take_cores(request)
        with startup.stage("loading"):
            planned = plan(target, draft, request)
            device, limits = planned.start(), _limits(planned, request)
            identity = _identity(target, planned.target, device)
            runner = FusedRunner(device, planned.build.layout, limits, identity, True, request.execution.exact, True)
            assert planned.draft is not None
            return runner, FusedDraft(runner, _identity(draft, planned.draft, device))

    def compile(self, target: Checkpoint, draft: Checkpoint | None, request: LoadRequest, part: str) -> Iterator[str]:
        """With --pair both, compiles a fused server's models apart as well."""
        if part != "fused":
            if part == "draft" and _settings(request).eagle:
                raise ValueError("compile_for: an EAGLE head drafts in its target's graph alone; compile fused")
            settings = replace(_settings(request), eagle=False, draft_neuron_config={})
            settings = settings if part == "target" else replace(settings, adapters=())
            checkpoint = draft if part == "draft" and draft is not None else target
            yield _compiled(plan(checkpoint, None, replace(request, settings=settings, verifies=part == "target")))
            return
        assert draft is not None
        if self.fuses(request):
            yield _compiled(plan(target, draft, request))
        for each in self.unfused(request):
            yield _compiled(plan(target if each.verifies else draft, None, each))

    def is_head(self, checkpoint: Checkpoint) -> bool:
        return is_head(Path(checkpoint.folder))

    def load_head(
        self, checkpoint: Checkpoint, target: Runner | Checkpoint, request: LoadRequest, startup: Startup
    ) -> Runner:
        raise ValueError(BESIDE)

    def fuses(self, request: LoadRequest) -> bool:
        return _settings(request).pair != "apart"

    def unfused(self, request: LoadRequest) -> Sequence[LoadRequest]:
        """The fused graph is greedy and hides logits; models apart serve the other requests."""
        settings = _settings(request)
        if settings.pair == "fused":
            return ()
        target = replace(request, settings=apart(settings), verifies=True)
        if settings.eagle:
            return (target,)
        return target, replace(request, settings=draft_apart(settings), verifies=False)


def require_nxdi() -> None:
    """Raises ValueError, one line with the remedy, unless NxDI and its dependencies are installed.

    Needs no device: any machine may compile. Packages that NxDI calls or is compiled against must have the versions of
    NxDI's metadata.
    """
    why = refusal(clashes(installed_packages()))
    if not why and (absent := [package for package in PACKAGES if not importable(package)]):
        why = missing("nxdi", compile_only=True) or f"{', '.join(absent)} cannot be imported"
    if why:
        raise ValueError(f"backend: nxdi is not available here: {why}; {DOCTOR}")


def importable(package: str) -> bool:
    """Whether the package is there and no placeholder of PyPI."""
    name = package.replace("-", "_")
    if name in sys.modules:
        return True
    found = installed_package(package)
    return importlib.util.find_spec(name) is not None and not (found and found.placeholder)


def versions() -> dict[str, str]:
    """Versions of the packages that compiled code depends on."""
    found = distributions()
    return {name: found[name].version if name in found else "unknown" for name in (*PACKAGES, *ALSO)}


def take_cores(request: LoadRequest) -> None:
    """Names this process's cores to the runtime, before its start. Raises ValueError if too few."""
    if request.execution.cores is None:
        return
    cores, degree = parse_cores(request.execution.cores), _settings(request).tp_degree
    if len(cores) < degree:
        raise ValueError(f"cores: tp_degree {degree} needs as many cores, and {len(cores)} are named")
    os.environ[VISIBLE_CORES] = format_cores(cores)


def plan(target: Checkpoint, draft: Checkpoint | None, request: LoadRequest) -> PlannedModel:
    """Plans one model, a target if `request.verifies`, or a pair with `draft`. Raises CheckpointError or ValueError."""
    settings, shape, execution = _settings(request), request.shape, request.execution
    eagle3 = draft is not None and is_head(Path(draft.folder))
    if draft is not None and eagle3 and not settings.eagle:
        raise CheckpointError(f"{draft.folder}: an EAGLE-3 head: with NxD Inference it drafts by --draft model --eagle")
    dtype = None if execution.dtype == "auto" else execution.dtype
    adapters = read_adapters(settings.adapters) if draft or request.verifies else ()
    kind = kind_of(draft is not None, request.verifies, shape)
    build = plan_build(kind, shape, settings, dtype, eagle3, adapters)
    if draft is not None and build.eagle:
        normed = bool((build.draft or {}).get("enable_eagle_draft_input_norm"))
        check_completed(Path(draft.folder), text_config(Path(target.folder)), normed)
    own, other = facts(target, build.max_length), facts(draft, build.max_length) if draft else None
    if other and own.vocab_size != other.vocab_size:
        raise CheckpointError(
            f"{other.folder}: {other.vocab_size} token ids, the target has {own.vocab_size}; a fused graph has one"
        )
    check_target(build, own)
    _warn_of_short_buckets(build)
    build = with_draft_kept(build, other) if other else build
    sources = {"target": _source(target, own)} | ({"draft": _source(draft, other)} if draft and other else {})
    return PlannedModel(build, own, other, _wanted(build, target.name, sources, settings))


def _compiled(planned: PlannedModel) -> str:
    """Compiles, and publishes to the store if any. Returns a line for the log."""
    from tandem_nxdi.sdk import compile_only

    wanted = planned.wanted
    if wanted.store is not None:
        check_store(wanted.store)
    folder, compiled = compile_only(planned.build, planned.target, planned.draft, wanted)
    line = f"{wanted.name}: {'compiled' if compiled else 'there already'}"
    if wanted.store is None:
        return f"{line}, in {wanted.root}"
    return f"{line}, {'published to' if wanted.publish(folder, wanted.store) else 'in'} {wanted.store}"


def _warn_of_short_buckets(build: Build) -> None:
    # AWS's tutorial of Llama-3.1-405B: kernels with short context buckets give a "Numerical Error".
    kernels = [name for name in _CONTEXT_KERNELS if build.neuron.get(name)]
    if kernels and any(chunk < _SHORT_BUCKET for chunk in build.layout.chunks):
        log.warning(
            "neuron_config: %s with context buckets of %d tokens and less: AWS warns of numerical errors; give "
            "context_encoding_buckets that begin at 2048",
            *(", ".join(kernels), _SHORT_BUCKET),
        )


def _limits(planned: PlannedModel, request: LoadRequest) -> Limits:
    build, shape = planned.build, request.shape
    return Limits(shape.slots, build.max_length, shape.max_draft, build.layout.chunks[-1], planned.target.vocab_size)


def _identity(checkpoint: Checkpoint, own: ModelFacts, device: Application) -> RunnerIdentity:
    return RunnerIdentity(checkpoint.name, weights_revision(checkpoint), device.dtype, "neuron", "nxdi", own.end_ids)


def _wanted(build: Build, name: str, sources: Mapping[str, Any], settings: NxdiSettings) -> CompiledModel:
    made_from: dict[str, Any] = {
        "what": f"compiled by NxD Inference for Tandem: {build.kind.value}{' with EAGLE' if build.eagle else ''}",
        **sources,
        "neuron_config": dict(build.neuron),
        "sdk": versions(),
    }
    if build.adapters:
        made_from |= {"adapters": dict(build.adapters)}
    if variables := fp8_environment(build.neuron):
        made_from |= {"environment": variables}
    if build.draft is not None:
        made_from |= {"draft_neuron_config": dict(build.draft)}
    whole = f"{name.replace('/', '--')}-{build.kind.value}"
    return compiled_model(settings.compiled_dir, whole, made_from, settings.artifacts)


def _source(checkpoint: Checkpoint, own: ModelFacts) -> Mapping[str, str]:
    return {"name": checkpoint.name, "weights": weights_revision(checkpoint), "config": own.digest}


def _settings(request: LoadRequest) -> NxdiSettings:
    return request.settings if isinstance(request.settings, NxdiSettings) else NxdiSettings()


BACKEND = NxdiBackend()

"""Registers NxD Inference as a backend."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
from tandem.checkpoints.head_config import is_head
from tandem.checkpoints.locate import Checkpoint, find
from tandem.host.cores import format_cores, parse_cores
from tandem.runners.backends import Backend, LoadRequest
from tandem.runners.protocol import Runner
from tandem.runners.startup import Startup
from tandem_nxdi.adapters import read_adapters
from tandem_nxdi.availability import require_nxdi
from tandem_nxdi.checkpoint import local
from tandem_nxdi.load import compile_nxdi, compile_nxdi_pair, load_nxdi, load_nxdi_pair, start_on_device
from tandem_nxdi.settings import NxdiSettings, apart, draft_apart

VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
BESIDE = "draft: with NxD Inference a head drafts in one graph with its target: fused_target --draft model --eagle"


class NxdiBackend(Backend):
    """Loads a pair in one process as one graph."""

    loads_pairs = True

    def require(self) -> None:
        require_nxdi()

    def find(self, model: str | None) -> Checkpoint:
        # NxDI shards weights from a folder, so a hub id is downloaded.
        return local(find(model))

    def adapter(self, choice: AdapterChoice) -> Adapter:
        # NxDI reads adapters itself.
        return read_adapters([choice])[0]

    def draft_has_tokenizer(self, request: LoadRequest) -> bool:
        return not _settings(request).eagle  # an EAGLE head has none

    def load(self, checkpoint: Checkpoint, request: LoadRequest, startup: Startup) -> Runner:
        take_cores(request)
        with startup.stage("loading"):
            return load_nxdi(
                checkpoint, request.execution, request.shape, _settings(request), request.verifies, start_on_device
            )

    def load_pair(
        self, target: Checkpoint, draft: Checkpoint, request: LoadRequest, startup: Startup
    ) -> tuple[Runner, Runner]:
        take_cores(request)
        with startup.stage("loading"):
            return load_nxdi_pair(target, draft, request.execution, request.shape, _settings(request), start_on_device)

    def compile(self, target: Checkpoint, draft: Checkpoint | None, request: LoadRequest, part: str) -> Iterator[str]:
        """With --pair both, compiles a fused server's models apart as well."""
        own = (request.execution, request.shape)
        if part != "fused":
            if part == "draft" and _settings(request).eagle:
                raise ValueError("compile_for: an EAGLE head drafts in its target's graph alone; compile fused")
            settings = replace(_settings(request), eagle=False, draft_neuron_config={})
            settings = settings if part == "target" else replace(settings, adapters=())
            checkpoint = draft if part == "draft" and draft is not None else target
            yield compile_nxdi(checkpoint, *own, settings, part == "target")
            return
        assert draft is not None
        if self.fuses(request):
            yield compile_nxdi_pair(target, draft, *own, _settings(request))
        for each in self.unfused(request):
            yield compile_nxdi(target if each.verifies else draft, *own, _settings(each), each.verifies)

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


def take_cores(request: LoadRequest) -> None:
    """Names this process's cores to the runtime, before its start. Raises ValueError if too few."""
    if request.execution.cores is None:
        return
    cores, degree = parse_cores(request.execution.cores), _settings(request).tp_degree
    if len(cores) < degree:
        raise ValueError(f"cores: tp_degree {degree} needs as many cores, and {len(cores)} are named")
    os.environ[VISIBLE_CORES] = format_cores(cores)


def _settings(request: LoadRequest) -> NxdiSettings:
    return request.settings if isinstance(request.settings, NxdiSettings) else NxdiSettings()


BACKEND = NxdiBackend()

"""Registers NxD Inference as a backend."""

from __future__ import annotations

from tandem.checkpoints.locate import Checkpoint, find
from tandem.runners.backends import LoadRequest
from tandem.runners.nxdi.availability import require_nxdi
from tandem.runners.nxdi.load import load_nxdi, load_nxdi_pair, start_on_device
from tandem.runners.nxdi.settings import NxdiSettings
from tandem.runners.protocol import Runner
from tandem.runners.startup import Startup


class NxdiBackend:
    """Loads a target and its draft model as one graph where both are served by one process."""

    loads_pairs = True

    def require(self) -> None:
        require_nxdi()

    def find(self, model: str | None) -> Checkpoint:
        return find(model)

    def tokenizer(self, checkpoint: Checkpoint) -> None:
        return None

    def draft_has_tokenizer(self, request: LoadRequest) -> bool:
        return not _settings(request).eagle  # an EAGLE head has none

    def load(self, checkpoint: Checkpoint, request: LoadRequest, startup: Startup) -> Runner:
        with startup.stage("loading"):
            return load_nxdi(
                checkpoint, request.execution, request.shape, _settings(request), request.verifies, start_on_device
            )

    def load_pair(
        self, target: Checkpoint, draft: Checkpoint, request: LoadRequest, startup: Startup
    ) -> tuple[Runner, Runner]:
        with startup.stage("loading"):
            return load_nxdi_pair(target, draft, request.execution, request.shape, _settings(request), start_on_device)


def _settings(request: LoadRequest) -> NxdiSettings:
    return request.settings if isinstance(request.settings, NxdiSettings) else NxdiSettings()


BACKEND = NxdiBackend()

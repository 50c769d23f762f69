"""Registers the torch backend, which also runs the native steps."""

from __future__ import annotations

from pathlib import Path

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice, read_adapter
from tandem.checkpoints.head_config import is_head
from tandem.checkpoints.locate import Checkpoint, find
from tandem.runners.backends import Backend, LoadRequest
from tandem.runners.loading import load_runner
from tandem.runners.protocol import Runner
from tandem.runners.startup import Startup


class TorchBackend(Backend):
    """Loads models separately, with `Capabilities.fuse` for a pair's graphs."""

    def find(self, model: str | None) -> Checkpoint:
        return find(model)

    def adapter(self, choice: AdapterChoice) -> Adapter:
        return read_adapter(choice)

    def load(self, checkpoint: Checkpoint, request: LoadRequest, startup: Startup) -> Runner:
        own = (request.execution, request.shape, request.verifies, request.sole_model)
        runner = load_runner(checkpoint, *own, startup)
        if request.head is not None:
            from tandem.runners.eagle.load import expect_head

            expect_head(request.head, runner)
        return runner

    def is_head(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.gguf is None and is_head(Path(checkpoint.folder))

    def load_head(
        self, checkpoint: Checkpoint, target: Runner | Checkpoint, request: LoadRequest, startup: Startup
    ) -> Runner:
        from tandem.runners.eagle.load import load_head, load_remote_head

        if isinstance(target, Checkpoint):
            return load_remote_head(checkpoint, target, request.execution, request.shape, startup)
        return load_head(checkpoint, target, startup, request.execution)


BACKEND = TorchBackend()

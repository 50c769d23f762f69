"""NxDI runners over the stand-in, loaded the way a server loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.locate import find
from tandem.engine.engine import Engine
from tandem.engine.generator import Generator
from tandem.engine.generators import drafted_generator
from tandem.engine.load_models import Loaded
from tandem.engine.model_drafter import ModelDrafter
from tandem.runners.backends import LoadRequest
from tandem.runners.load_runner import Execution, Shape
from tandem.runners.startup import Startup
from tandem.speculation.verification_mode import Pipeline
from tandem_nxdi.backend import BACKEND
from tandem_nxdi.fused import FusedDraft, FusedRunner
from tandem_nxdi.nxdi_runner import NxdiRunner
from tandem_nxdi.nxdi_settings import NxdiSettings
from tests.runners.nxdi import simulated
from tests.runners.nxdi.simulated import Application, model_folder

SHAPE = Shape(slots=3, max_length=64, max_draft=4)


class Bench:
    """Makes runners in a folder of its own. `settings` are NxdiSettings' fields, `fast` is --fast."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.salted: dict[tuple[int, float, str], Path] = {}

    def model(self, salt: int = 0, miss: float = 0.0, model_type: str = "llama") -> Path:
        key = (salt, miss, model_type)
        if key not in self.salted:
            self.salted[key] = model_folder(self.folder, f"model{len(self.salted)}", *key)
        return self.salted[key]

    def settings(self, given: dict[str, Any]) -> NxdiSettings:
        return NxdiSettings(compiled_dir=str(self.folder / "compiled"), **given)

    def one(self, verifies: bool, miss: float, shape: Shape, fast: bool, given: dict[str, Any]) -> NxdiRunner:
        request = LoadRequest(Execution(exact=not fast), shape, self.settings(given), verifies)
        runner = BACKEND.load(find(str(self.model(miss=miss))), request, Startup())
        assert isinstance(runner, NxdiRunner)
        runner.warm_up()
        return runner

    def target(self, shape: Shape = SHAPE, fast: bool = False, **given: Any) -> NxdiRunner:
        return self.one(True, 0.0, shape, fast, given)

    def draft(self, miss: float = 0.3, shape: Shape = SHAPE, **given: Any) -> NxdiRunner:
        return self.one(False, miss, shape, False, given)

    def pair(
        self, miss: float = 0.3, shape: Shape = SHAPE, fast: bool = False, model_type: str = "llama", **given: Any
    ) -> tuple[FusedRunner, FusedDraft]:
        folder = self.model(miss=miss, model_type=model_type)
        if given.get("eagle"):
            simulated.as_eagle_head(folder)
        request = LoadRequest(Execution(exact=not fast), shape, self.settings(given))
        target, draft = BACKEND.load_pair(find(str(self.model())), find(str(folder)), request, Startup())
        assert isinstance(target, FusedRunner) and isinstance(draft, FusedDraft)
        target.warm_up()
        return target, draft


def drafted(target: Loaded, draft: Engine) -> Generator:
    """Drafts of four tokens by a model beside the target."""

    def drafter(request: Any, stats: Any, times: Any) -> ModelDrafter:
        return ModelDrafter(draft, request, target.runner.limits.vocab_size)

    return drafted_generator(target, 4, "draft", drafter, Pipeline.OFF)


def application() -> Application:
    """The one that was loaded last."""
    return simulated.LOADED[-1]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Imported into the test files that want it."""
    simulated.install(monkeypatch)
    return Bench(tmp_path)

"""The tiny target and EAGLE-3 head that several files load."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.runners.tiny import model_folder

    return model_folder(tmp_path_factory.mktemp("target"), seed=5)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tandem.runners.eagle.module import write_head
    from tests.runners.test_eagle import a_head

    made = tmp_path_factory.mktemp("head")
    write_head(made, a_head())
    return made

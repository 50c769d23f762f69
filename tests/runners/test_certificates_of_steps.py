"""Steps that passed their checks are not checked again, unless something that the checks depend on has changed."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.runners.native import load_native
from tandem.runners.protocol import Limits, RunnerIdentity

IDENTITY = RunnerIdentity("m", "sha256:1", "q4_1/float32", "cpu", "native")
LIMITS = Limits(2, 96, 4, 8, 258)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "library.so").write_bytes(b"library")
    return tmp_path / "cache"


def checked(folder: Path, identity: RunnerIdentity = IDENTITY, passes: bool = True, **changes: Any) -> bool:
    """Whether steps were checked, and not trusted."""
    ran: list[bool] = []

    def check() -> bool:
        ran.append(True)
        return passes

    given = {"library": folder / "library.so", "threads": 2, "limits": LIMITS, "again": False, **changes}
    assert load_native.certified(identity, **given, check=check) is passes
    return bool(ran)


def test_what_was_kept_holds_for_the_same_and_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert checked(tmp_path, passes=False) and checked(tmp_path)
    with caplog.at_level(logging.INFO):
        assert not checked(tmp_path)
    assert "m: its steps passed their check here before" in caplog.text and "--recertify" in caplog.text
    (tmp_path / "other.so").write_bytes(b"another build")
    for identity in (replace(IDENTITY, weights_revision="sha256:2"), replace(IDENTITY, dtype="int8/float32")):
        assert checked(tmp_path, identity)
    other = {"library": tmp_path / "other.so"}
    for changes in ({"threads": 1}, {"limits": replace(LIMITS, slots=3)}, other, {"again": True}):
        assert checked(tmp_path, **changes)
    for name in ("cpu_model", "cpu_features"):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(load_native, name, lambda: "another CPU")
            assert checked(tmp_path)


def test_a_note_that_was_written_to_does_not_count(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert checked(tmp_path)
    (file,) = (cache / "certificates").glob("*/facts.json")
    file.write_text(file.read_text().replace("sha256:1", "sha256:2"))
    assert checked(tmp_path) and "was changed" in caplog.text and not checked(tmp_path)


def test_without_a_cache_every_start_checks(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    assert checked(tmp_path) and checked(tmp_path) and "cannot keep in" in caplog.text

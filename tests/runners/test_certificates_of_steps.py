"""Steps that passed their checks are not checked again, unless something that the checks depend on has changed."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.runners.native import load
from tandem.runners.native.load import Certificate
from tandem.runners.protocol import Limits, RunnerIdentity

IDENTITY = RunnerIdentity("m", "sha256:1", "q4_1/float32", "cpu", "native")
LIMITS = Limits(2, 96, 4, 8, 258)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "library.so").write_bytes(b"library")
    return tmp_path / "cache"


def certified(folder: Path, identity: RunnerIdentity = IDENTITY, **changes: Any) -> Certificate:
    return Certificate(identity, **{"library": folder / "library.so", "threads": 2, "limits": LIMITS, **changes})


def test_what_was_kept_holds_for_the_same_and_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = certified(tmp_path)
    assert not first.holds
    first.keep()
    with caplog.at_level(logging.INFO):
        assert certified(tmp_path).holds
    assert "m: its steps passed their check here on " in caplog.text and "--recertify" in caplog.text
    (tmp_path / "other.so").write_bytes(b"another build")
    for identity in (replace(IDENTITY, weights_revision="sha256:2"), replace(IDENTITY, dtype="int8/float32")):
        assert not certified(tmp_path, identity).holds
    changes = (
        {"threads": 1},
        {"limits": replace(LIMITS, slots=3)},
        {"library": tmp_path / "other.so"},
        {"again": True},
    )
    assert [certified(tmp_path, **change).holds for change in changes] == [False] * 4
    for name in ("cpu_model", "cpu_features"):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(load, name, lambda: "another CPU")
            assert not certified(tmp_path).holds


def test_a_certificate_that_was_written_to_does_not_count(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certified(tmp_path).keep()
    (file,) = (cache / "certificates").glob("*.json")
    file.chmod(0o666)
    assert not certified(tmp_path).holds and "writable by other users" in caplog.text
    file.chmod(0o600)
    assert certified(tmp_path).holds
    file.write_text(file.read_text().replace("sha256:1", "sha256:2"))
    assert not certified(tmp_path).holds and "was changed" in caplog.text


def test_without_a_cache_every_start_checks(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    certified(tmp_path).keep()
    assert not certified(tmp_path).holds and "cannot keep in" in caplog.text

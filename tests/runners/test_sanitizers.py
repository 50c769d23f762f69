"""The native tests under the address and undefined-behaviour sanitizers, and that these find what is planted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.runners.native.compilation import SOURCES, LibraryMissing, find_compiler
from tests.support import REPOSITORY

TESTS = (
    "test_native_bounds.py",
    "test_native.py",
    "test_native_draws.py",
    "test_native_head.py",
    "test_native_adapters.py",
    "test_remote_native_head.py",
    "test_quantised.py",
    "test_prefill_pages.py",
)
SECONDS = 1800
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def libasan() -> str:
    """The sanitizer's library, which must be the first that a process loads."""
    try:
        compiler = find_compiler()
    except LibraryMissing as error:
        pytest.skip(str(error))
    asked = [compiler, "-print-file-name=libasan.so"]
    found = Path(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip())
    if not found.is_absolute() or not found.exists():
        pytest.skip(f"{compiler} has no libasan.so (on Debian and Ubuntu it comes with g++)")
    return str(found.resolve())


def sanitized(libasan: str, place: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Runs tests with a library that is sanitized; returns the exit code, the output, and what was found."""
    found = f"log_path={place / 'found'}"
    own = {
        "LD_PRELOAD": libasan,
        "ASAN_OPTIONS": f"detect_leaks=0:{found}",  # Python frees little at its end
        "UBSAN_OPTIONS": f"print_stacktrace=1:{found}",
        "PYTHONPATH": str(REPOSITORY),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.runners.sanitized", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    findings = "\n".join(path.read_text() for path in sorted(place.glob("found.*")))
    return ran.returncode, ran.stdout + ran.stderr, findings


def test_native_steps_touch_nothing_but_their_memory(libasan: str, tmp_path: Path) -> None:
    status, said, findings = sanitized(libasan, tmp_path, *(f"tests/runners/{name}" for name in TESTS))
    assert not findings, findings[:4000]
    assert status == 0, said[-4000:]


def test_without_the_check_of_tokens_the_sanitizer_finds_the_read_beyond_the_embedding(
    libasan: str, tmp_path: Path
) -> None:
    """A check that could not fail would be none: this is A2 of the audit, planted in a copy of the sources."""
    copy = shutil.copytree(SOURCES, tmp_path / "sources")
    check = "if (!within(rows.tokens[i], shape.vocabulary)) fault = TOKEN;"
    text = (copy / "api.cpp").read_text()
    assert text.count(check) == 1, "adapt the place of the mistake"
    (copy / "api.cpp").write_text(text.replace(check, ";"))
    asked = ("--sources", str(copy), "tests/runners/test_native_bounds.py", "-k", "of_a_prompt")
    status, said, findings = sanitized(libasan, tmp_path, *asked, TANDEM_CACHE=str(tmp_path / "cache"))
    assert status != 0 and "AddressSanitizer" in findings, said[-2000:]

"""Files with secrets: who may read them, and whether they have changed."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest

from tandem.rpc.credentials import lines_of, signature, warn_if_others_read


def test_a_group_that_may_read_is_warned_about() -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    log = logging.getLogger("tandem.security")
    log.addHandler(handler)
    try:
        with tempfile.NamedTemporaryFile() as file:
            for mode, warnings in ((0o600, 0), (0o640, 1), (0o604, 2), (0o620, 2)):
                os.chmod(file.name, mode)
                warn_if_others_read("tokens", file.name)
                assert len(said) == warnings, oct(mode)
    finally:
        log.removeHandler(handler)
    assert "mode 640" in said[0].getMessage() and "tokens: " in said[0].getMessage()


def test_a_rewrite_of_the_same_length_is_a_change() -> None:
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_text("alice one")
        before = signature(file.name)
        path.write_text("alice two")
        os.utime(path, ns=(0, before[0][2] + 1))
        assert signature(file.name) != before


def test_lines_keep_their_numbers_and_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# who\n\n alice one \nbob two")
    assert lines_of("tokens", str(file)) == [(3, "alice one"), (4, "bob two")]
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"tokens: .* not UTF-8 text"):
        lines_of("tokens", str(file))

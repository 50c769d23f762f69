"""The comparison of formats' quality: llama.cpp's files and figures are read as its source writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.llama_quality import compared, judged, parsed, reference_in
from benchmarks.quantised import log_softmax


def written(file: Path, windows: list[list[int]], logits: np.ndarray) -> Path:
    """Writes logits [positions, vocabulary] as tools/perplexity/perplexity.cpp does."""
    vocabulary = logits.shape[1]
    with file.open("wb") as to:
        to.write(b"_logits_" + np.array([len(windows[0]), vocabulary, len(windows)], np.int32).tobytes())
        to.write(np.array(windows, np.int32).tobytes())
        for row in logits.astype(np.float32):
            most, least = row.max(), max(row.min(), row.max() - 16)
            scale = np.float32((most - least) / 65535)
            bits = np.where(row > least, np.rint((row - least) / scale), 0).astype(np.uint16)
            begin = least - most - np.log(np.exp(row - most).sum())
            to.write(np.array([scale, begin], np.float32).tobytes() + bits.tobytes())
            to.write(b"\0\0" * (vocabulary % 2))
    return file


@pytest.mark.parametrize("vocabulary", [40, 41])
def test_what_llama_perplexity_wrote_is_read_and_its_own_logits_diverge_by_nothing(
    tmp_path: Path, vocabulary: int
) -> None:
    windows = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]]
    logits = np.random.default_rng(0).uniform(-7, 7, (6, vocabulary)).astype(np.float32)
    reference = reference_in(written(tmp_path / "base.kld", windows, logits))
    assert reference.windows == windows
    assert np.abs(reference.logs - log_softmax(logits)).max() < 1e-3
    assert abs(compared(reference.logs, logits).mean) < 1e-4
    assert compared(reference.logs, logits).same == 1.0


def test_a_divergence_is_that_of_the_definition() -> None:
    logits = np.array([[0.0, 1.0, 2.0, -40.0]], np.float32)
    other = np.array([[3.0, 1.0, 2.0, 5.0]], np.float32)
    p, q = np.exp(log_softmax(logits)), np.exp(log_softmax(other))
    found = compared(log_softmax(logits).astype(np.float32), other)
    assert found.mean == pytest.approx(float((p[0, :3] * np.log(p[0, :3] / q[0, :3])).sum()), rel=1e-5)
    assert found.same == 0.0


def test_the_second_half_of_each_window_is_judged_but_its_last_token() -> None:
    assert judged([[0] * 8, [0] * 8]).tolist() == [*([False] * 4), True, True, True, False] * 2


def test_figures_are_read_from_what_llama_perplexity_prints_and_their_absence_is_an_error() -> None:
    said = "Mean    KLD:   0.004080 ±   0.000167\n99.0%   KLD:   0.03\nSame top p: 96.340 ± 0.480 %\n"
    found = parsed(said)
    assert (found.mean, found.same) == (0.00408, pytest.approx(0.9634))
    with pytest.raises(ValueError, match="no divergence"):
        parsed("error: out of memory")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match="holds no logits"):
        reference_in(tmp_path / "other")

"""Tensors of folders that are written again: what is read is of one version, and what was read stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.tensors import Tensors, save_tensors, save_whole


def in_place(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes over a file, as safetensors did before 0.8."""
    with file.open("r+b" if file.exists() else "wb") as opened:
        opened.truncate()
        opened.write(safetensors.torch.save(tensors, metadata))


def pickled(tensors: dict[str, Tensor], file: Path) -> None:
    torch.save(tensors, file)


WRITERS = {
    "ours": (save_tensors, "model.safetensors"),
    "in place": (lambda file, tensors: in_place(tensors, file), "model.safetensors"),
    "pickled": (lambda file, tensors: pickled(tensors, file), "pytorch_model.bin"),
}
every_writer = pytest.mark.parametrize("writer", WRITERS)


def filled(value: float, count: int = 3) -> dict[str, Tensor]:
    return {"a": torch.full((count,), value), "b": torch.full((2, count), value, dtype=torch.bfloat16)}


@every_writer
def test_a_folder_that_is_written_again_is_read_anew(writer: str, tmp_path: Path) -> None:
    write, name = WRITERS[writer]
    for value, count in ((1.0, 3), (2.0, 3), (3.0, 5)):
        write(tmp_path / name, filled(value, count))
        tensors = Tensors(tmp_path)
        assert tensors["a"].tolist() == [value] * count
        assert (tensors.shape("b"), tensors.sizes()) == ((2, count), {"a": 4 * count, "b": 4 * count})


@every_writer
def test_a_file_that_changes_while_its_tensors_are_read_is_refused(writer: str, tmp_path: Path) -> None:
    write, name = WRITERS[writer]
    write(tmp_path / name, filled(1.0))
    tensors = Tensors(tmp_path)
    assert tensors["a"][0] == 1.0
    write(tmp_path / name, filled(2.0, 4))
    for read in (tensors.__getitem__, tensors.shape, tensors.stored):
        with pytest.raises(CheckpointError, match=f"{name}: was replaced or written to while it was read"):
            read("b")
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        tensors["a"]


def test_what_was_read_stays_while_the_file_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs with them, and an evaluation in the process that trains: a file cut short would be SIGBUS."""
    monkeypatch.setattr(safetensors.torch, "save_file", in_place)
    save_tensors(tmp_path / "model.safetensors", filled(1.0, 100_000))
    before = Tensors(tmp_path)["a"]
    save_tensors(tmp_path / "model.safetensors", filled(2.0, 10))
    assert before.sum() == 100_000 and Tensors(tmp_path)["a"].sum() == 20
    save_whole(tmp_path, lambda folder: in_place(filled(3.0, 1), folder / "model.safetensors"))
    assert before.sum() == 100_000 and Tensors(tmp_path)["a"].sum() == 3
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_interrupted_writer_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tensors(tmp_path / "model.safetensors", filled(1.0))

    def interrupted(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", interrupted)
    with pytest.raises(OSError, match="no space"):
        save_tensors(tmp_path / "model.safetensors", filled(2.0))
    assert Tensors(tmp_path)["a"].tolist() == [1.0] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_bytes_are_counted_for_every_dtype(tmp_path: Path) -> None:
    dtypes = (torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.bfloat16)
    tensors = {str(dtype): torch.zeros(3, 5).to(dtype) for dtype in (*dtypes, torch.float32, torch.int64)}
    save_tensors(tmp_path / "model.safetensors", tensors)
    assert Tensors(tmp_path).sizes() == {name: 15 * each.element_size() for name, each in tensors.items()}

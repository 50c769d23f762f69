"""The sequence length and the slots of a server whose operator names none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.locate import Checkpoint
from tandem.runners import own_sizes as module
from tandem.runners.load_runner import Execution, Shape
from tandem.runners.own_sizes import own_length, own_sizes

MIB = 2**20
MODEL = {
    "max_position_embeddings": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}  # 8 KiB a position in float32


def chosen(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_mib: int | None,
    *configs: dict[str, Any],
    head: bool = False,
    **kind: Any,
) -> tuple[int, int]:
    monkeypatch.setattr(module, "free_bytes", lambda: None if free_mib is None else free_mib * MIB)
    checkpoints = []
    for number, config in enumerate(configs or (MODEL,)):
        (folder / str(number)).mkdir(exist_ok=True)
        (folder / str(number) / "config.json").write_text(json.dumps(config))
        checkpoints.append(Checkpoint(str(number), str(folder / str(number))))
    shape = own_sizes(Execution(**{"device": "cpu", **kind}), Shape(), checkpoints, more_slots=True, head=head)
    return shape.max_length, shape.slots


@pytest.mark.parametrize(
    ("free_mib", "expected"),
    [
        (100_000, (8192, 8)),  # the model's own, and no more slots than certify quickly
        (4 * 6 * 64, (8192, 6)),
        (4 * 4 * 64, (8192, 4)),
        (4 * 4 * 16, (2048, 4)),
        (1, (512, 4)),  # as before there was a choice
        (None, (512, 4)),
    ],
)
def test_all_slots_take_at_most_a_quarter_of_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int | None, expected: tuple[int, int]
) -> None:
    assert chosen(tmp_path, monkeypatch, free_mib) == expected


def test_a_head_beside_them_takes_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(tmp_path, monkeypatch, 4 * 4 * 16, head=True) == (1216, 4), "8 KiB a position, and 5"


def test_where_memory_is_taken_whole_nothing_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(tmp_path, monkeypatch, 100_000, tp_degree=2) == (512, 4)


@pytest.mark.parametrize(
    ("said", "length"),
    [
        ({"sliding_window": 4096}, 32768),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}, 32768),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 32768),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_the_length_is_what_the_rotary_embedding_serves_without_giving_up_short_prompts(
    said: dict[str, Any], length: int | None
) -> None:
    assert own_length({"max_position_embeddings": 32768, **said}) == length

"""The benchmark of a chat's turns, on a server of the toy model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.chat_turns import main


@pytest.mark.thorough
def test_it_measures_three_turns_of_each_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = "--backend toy --sequence_length 400"
    output = tmp_path / "deeper" / "turns.json"
    assert main(["--chats", "2", "--max_new_tokens", "20", "--server-flags", toy, "--output", str(output)]) == 0
    turns = json.loads(output.read_text())["turns"]
    assert [(each["chat"], each["turn"]) for each in turns] == [(chat, turn) for chat in (1, 2) for turn in (1, 2, 3)]
    assert all(each["first_ms"] > 0 and each["cached"] < each["prompt"] for each in turns)
    assert all(each["cached"] for each in turns if each["turn"] > 1)
    assert capsys.readouterr().out.count(" prompt tokens cached, first token in ") == 3

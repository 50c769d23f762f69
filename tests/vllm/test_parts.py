"""What vLLM's drafter is made of: its settings, rows known by their tokens, and its metrics."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import numpy as np
import pytest

from tandem.speculation.errors import InvalidField
from tandem.vllm import RemoteDrafter
from tandem.vllm.drafter_settings import Settings, settings_of
from tandem.vllm.rows import Held, RowMatcher
from tests.vllm.engine import drafter, vllm_config

WORKERS = {"TANDEM_DRAFT_WORKERS": "a:1, b:2"}


def test_settings_come_from_variables() -> None:
    assert settings_of(WORKERS) == Settings(("a:1", "b:2"))
    found = settings_of({**WORKERS, "TANDEM_DRAFT_BUDGET_MS": "7.5", "PATH": "x"})
    assert found == Settings(("a:1", "b:2"), 7.5)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "workers"),
        ({"TANDEM_DRAFT_WORKERS": "here"}, "workers"),
        ({"TANDEM_DRAFT_WORKERS": "a:1,a:1"}, "workers"),
        ({**WORKERS, "TANDEM_DRAFT_BUDGET_MS": "nan"}, "budget_ms"),
        ({**WORKERS, "TANDEM_DRAFT_BUDGET_MS": "much"}, "budget_ms"),
        ({**WORKERS, "TANDEM_DRAFT_ANSWER_SECONDS": "0"}, "answer_seconds"),
        ({**WORKERS, "TANDEM_DRAFT_METRICS_PORT": "2.5"}, "metrics_port"),
        ({**WORKERS, "TANDEM_DRAFT_METRICS_PORT": "65536"}, "metrics_port"),
        ({**WORKERS, "TANDEM_DRAFT_BUDGET": "7"}, "budget"),
        ({**WORKERS, "TANDEM_DRAFT_TLS_CA": "/nowhere"}, "tls_ca"),
        ({**WORKERS, "TANDEM_DRAFT_TOKEN_ENV": "PATH"}, "token_env"),
        ({**WORKERS, "TANDEM_DRAFT_INSECURE": "perhaps"}, "insecure"),
    ],
)
def test_a_wrong_setting_is_named_when_the_engine_starts(given: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        settings_of(given)
    assert caught.value.field == field


def step(table: RowMatcher, *rows: list[int], new: int = 1) -> tuple[list[Any], list[Any]]:
    """A step that gives each row its last `new` tokens; an empty row is in the middle of its prompt."""
    ids = np.zeros((len(rows), 64), np.int32)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = row
    return table.follow([row[-new:] for row in rows], [len(row) for row in rows], ids)


def test_rows_are_known_by_their_tokens_where_they_stand_and_where_they_moved_to() -> None:
    table = RowMatcher()
    (a, b, c), _ = step(table, [1, 2], [3, 4], [5, 6])
    assert step(table, [1, 2, 7], [3, 4, 8], [5, 6, 9]) == ([a, b, c], [])
    assert step(table, [5, 6, 9, 9], [3, 4, 8, 1]) == ([c, b], [])
    (same, _, other), gone = step(table, [5, 6, 9, 9, 0], [], [5, 6, 9, 9, 0])
    assert same is c and other not in (a, b, c), "two rows with the same tokens are two rows"
    assert gone == [a]
    assert same.tokens == [5, 6, 9, 9, 0] and same.ids.tolist() == same.tokens


def test_a_row_that_was_absent_for_a_step_is_known_when_it_comes_back_and_later_it_is_new() -> None:
    table = RowMatcher()
    (a, b), _ = step(table, [1, 2], [3, 4])
    step(table, [1, 2, 3])
    assert step(table, [1, 2, 3, 4], [3, 4, 5])[0] == [a, b]
    step(table, [1, 2, 3, 4, 5])
    _, gone = step(table, [1, 2, 3, 4, 5, 6])
    assert gone == [b] and len(table) == 1
    assert step(table, [1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6])[0][1] is not b


def test_what_is_left_of_a_draft_is_used_only_if_the_tokens_since_agree() -> None:
    (row,), _ = step(RowMatcher(), [1, 2, 3, 4])
    for held, left in (
        (Held(4, (5, 6, 7)), (5, 6)),
        (Held(2, (3, 4, 5)), (5,)),
        (Held(2, (3, 9, 5)), ()),
        (Held(2, (3, 4)), ()),
        (Held(2, (3,)), ()),
        (Held(), ()),
    ):
        row.held = held
        assert row.draft(2) == left, held


def test_a_rank_whose_drafts_vllm_does_not_read_asks_nobody() -> None:
    rank_1 = RemoteDrafter(vllm_config(rank=1, ranks=2), Settings(("127.0.0.1:1",)))
    with contextlib.closing(rank_1):
        assert rank_1.propose([[1], [2]], [1, 1], np.zeros((2, 8), np.int32)) == [[], []]
        assert rank_1.counts.all() == {}


def test_prometheus_reads_the_counters() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with contextlib.closing(drafter("127.0.0.1:1", metrics_port=port)) as asked:
        asked.propose([[2]], [6], np.array([[1, 2, 3, 4, 1, 2, 0, 0]], np.int32))
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    assert "tandem:vllm_steps_total 1.0" in page
    assert 'tandem:vllm_rows_total{source="none"} 1.0' in page
    assert 'tandem:vllm_worker_sessions{worker="127.0.0.1:1"} 1.0' in page


def test_the_drafter_needs_what_the_light_client_needs() -> None:
    code = "import sys, tandem.vllm; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "grpc" in loaded and "numpy" in loaded
    heavy = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "uvicorn", "vllm", "prometheus_client"}
    assert heavy.isdisjoint(loaded)

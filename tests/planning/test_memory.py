"""Bytes of one core, counted by hand."""

from __future__ import annotations

from tandem.workshops.planning.memory import GUARD, Core, Load, Part, kv_bytes
from tandem.workshops.planning.shapes import DecoderShape
from tandem.workshops.planning.sharding import Route, Weights

SMALL = DecoderShape("small", "llama", 64, 128, 3, 4, 2, 16, 258, 512, tied=False, bias=False)
PART = Part(SMALL, 1, Weights(2))
A_TOKEN = 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, dimensions, bytes


def test_a_core_is_full_at_what_is_usable_of_it() -> None:
    whole = Core(weights=0, kv=0, buffers=0, graphs=0, capacity=10**9)
    assert whole.usable < whole.capacity
    assert Core(whole.usable, 0, 0, 0, 10**9).fits
    for share in ("weights", "kv", "buffers", "graphs"):
        parts = {"weights": whole.usable, "kv": 0, "buffers": 0, "graphs": 0}
        assert not Core(**(parts | {share: parts[share] + 1}), capacity=10**9).fits


def test_the_cache_has_a_spare_row_and_room_behind_the_last_position() -> None:
    load = Load(batch=4, length=100, drafts=7, chunk=2)
    assert kv_bytes(PART, load, Route.TORCHNEURON) == 5 * (100 + 8) * A_TOKEN
    assert kv_bytes(PART, Load(4, 100, 7, chunk=64), Route.TORCHNEURON) == 5 * (100 + 64) * A_TOKEN
    assert kv_bytes(PART, load, Route.NXDI) == 4 * (100 + GUARD) * A_TOKEN

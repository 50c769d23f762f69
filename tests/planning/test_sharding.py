"""How a model is divided over cores."""

from __future__ import annotations

import pytest

from tandem.host.instances import FAMILIES
from tandem.workshops.planning.shapes import DecoderShape, read_shape
from tandem.workshops.planning.sharding import Route, Weights, core_heads, degrees, kv_bytes_per_token, weight_bytes
from tests.planning.support import model

BF16 = Weights(2)


def shape(name: str) -> DecoderShape:
    return read_shape(model(name), "model")


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Llama-3.2-1B", "Qwen3-32B", "Qwen3-0.6B"])
def test_one_core_holds_the_whole_model(name: str):
    whole = shape(name)
    assert weight_bytes(whole, 1, Route.TORCHNEURON, BF16) == 2 * whole.parameters
    untied = whole.vocabulary * whole.hidden if whole.tied else 0
    assert weight_bytes(whole, 1, Route.NXDI, BF16) == 2 * (whole.parameters + untied)


def test_cores_together_hold_the_model_and_what_is_repeated():
    whole = shape("Llama-3.1-8B")
    norms, table = 2 * whole.norm_parameters, 2 * whole.vocabulary * whole.hidden
    for degree in (2, 4, 8):
        assert degree * weight_bytes(whole, degree, Route.NXDI, BF16) == 2 * whole.parameters + (degree - 1) * norms
        repeated = (degree - 1) * (norms + table)
        assert degree * weight_bytes(whole, degree, Route.TORCHNEURON, BF16) == 2 * whole.parameters + repeated


@pytest.mark.parametrize(
    ("name", "degree", "heads"),
    [
        ("Llama-3.1-8B", 4, (8, 2)),
        ("Llama-3.1-70B", 16, (4, 1)),  # 8 KV heads repeated to 16
        ("Llama-3.1-405B", 64, (2, 1)),
        ("Llama-3.2-1B", 64, (1, 1)),  # 32 heads padded to 64
        ("Llama-3.1-8B", 12, (3, 3)),  # 12 is no multiple of 8 KV heads: every query head gets its own
    ],
)
def test_nxd_inference_pads_query_heads_and_repeats_kv_heads(name: str, degree: int, heads: tuple[int, int]):
    assert core_heads(shape(name), degree, Route.NXDI) == heads


def test_kv_of_a_core_stops_shrinking_where_heads_are_repeated():
    whole = shape("Llama-3.1-70B")
    kv = [kv_bytes_per_token(whole, degree, Route.NXDI, 2) for degree in (1, 8, 16, 32)]
    assert kv[0] == 2 * 80 * 8 * 128 * 2
    assert kv[1:] == [kv[0] // 8] * 3


def test_torchneuron_divides_only_what_divides():
    found = {d.degree: d for d in degrees(shape("Qwen3-32B"), FAMILIES["trn2"], 64, Route.TORCHNEURON)}
    assert [n for n, d in found.items() if not d.refused] == [1, 2, 4, 8]
    assert found[16].refused == "8 KV heads are not divisible by 16"
    assert "not seen to work" in found[2].remark


def test_degrees_are_the_runtimes_and_no_more_than_there_are_cores():
    target = shape("Llama-3.1-8B")
    assert [d.degree for d in degrees(target, FAMILIES["trn1"], 32, Route.NXDI)] == [1, 2, 8, 16, 32]
    assert [d.degree for d in degrees(target, FAMILIES["trn1"], 2, Route.NXDI)] == [1, 2]
    inf2 = {d.degree: d.refused for d in degrees(target, FAMILIES["inf2"], 24, Route.NXDI)}
    assert inf2 == {1: "", 2: "", 4: "", 8: "", 24: "32 heads are not divisible by 24"}


def test_eight_bits_are_counted_where_the_checkpoint_has_them():
    whole = shape("Llama-3.1-405B-FP8")
    plain, eight = (weight_bytes(whole, 1, Route.NXDI, Weights(2, c)) for c in (None, whole.converted))
    matrices = 124 * 3 * whole.hidden * whole.intermediate  # the MLPs of all layers but the first and the last
    scales = 124 * 4 * (2 * whole.intermediate + whole.hidden)
    assert plain - eight == matrices - scales

"""Quantised steps: the logits of the weights that are stored, the same bits in every shape of step and on every CPU."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tandem.checkpoints.gguf_blocks import FORMATS, StoredWeights
from tandem.checkpoints.locate import CheckpointError, find
from tandem.runners.load_runner import Execution, Shape, choose_dtype, load_runner
from tandem.runners.native import compilation
from tandem.runners.native.library import load_library
from tandem.runners.native.native_runner import NativeRunner, page_bytes
from tandem.runners.native.weights import Packing, encoded, packing
from tandem.runners.torch.platforms import CPU
from tests.daily import daily
from tests.gguf_files import write_gguf
from tests.runners import real
from tests.runners.test_native import check_bits, module_of, native, sequence
from tests.runners.tiny import model_folder

WIDE = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "initializer_range": 0.1,
}
NAMES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"} | {
    name: f"ffn_{name}" for name in ("gate", "up", "down")
}
PROGRAM = Path(__file__).parent / "native_bits.cpp"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def blocks(weight: np.ndarray, form: str, chance: np.random.Generator) -> np.ndarray:
    """The weights in blocks; random blocks where the gguf package cannot make any."""
    if form not in ("q4_k", "q6_k"):
        return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[form.upper()])
    size = FORMATS[form]
    made = chance.integers(0, 256, (weight.shape[0], weight.shape[1] // size.inputs, size.bytes), dtype=np.uint8)

    def scales(least: float, most: float) -> np.ndarray:
        return chance.uniform(least, most, made.shape[:2]).astype(np.float16)[..., None].view(np.uint8)

    if form == "q4_k":
        made[..., 0:2], made[..., 2:4] = scales(1e-4, 3e-4), scales(3e-3, 4e-3)
    else:
        made[..., 208:210] = scales(1e-5, 4e-5)
    return made.reshape(weight.shape[0], -1)


def stored(folder: Path, form: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Packing]:
    """A Llama, and how to pack it from a GGUF file that has its weights, rows of q and k in that format's order."""
    module, chance = module_of(dtype=torch.float32, **WIDE), np.random.default_rng(4)
    tensors: dict[str, Any] = {}

    def add(name: str, linear: torch.nn.Linear, heads: int = 0) -> None:
        weight = linear.weight.detach().numpy()
        made = blocks(weight, form, chance)
        kind = gguf.GGMLQuantizationType[form.upper()]
        linear.weight.data = torch.from_numpy(gguf.quants.dequantize(made, kind))
        if heads:
            made = made.reshape(heads, 2, len(made) // heads // 2, -1).swapaxes(1, 2).reshape(made.shape)
        tensors[name] = (np.ascontiguousarray(made), kind)

    for index, layer in enumerate(module.model.layers):
        for name, linear in [*layer.self_attn.named_children(), *layer.mlp.named_children()]:
            if short := name.removesuffix("_proj") if name.endswith("_proj") else "":
                add(f"blk.{index}.{NAMES[short]}.weight", linear, {"q": 4, "k": 2}.get(short, 0))
    add("output.weight", module.lm_head)
    heads = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
    file = write_gguf(folder / f"{form}.gguf", "llama", heads, tensors)
    return module.to(dtype), packing("as-stored", StoredWeights(file))


def distance(runner: NativeRunner, module: Any, tokens: list[int]) -> float:
    ours = runner.model.feed([1], [0], [tokens])
    with torch.inference_mode():
        theirs = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - theirs.mean()))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations to 8 bits and back, in groups of 32, as activations.h rounds them."""
    groups = x.unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / most)).round() * (most / 127)).flatten(-2)


def with_rounded_inputs(module: Any) -> Any:
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    AttentionInterface.register("short_cache", over_short_cache)
    module.set_attn_implementation("short_cache")
    return module


def over_short_cache(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **given: Any) -> Any:
    return sdpa_attention_forward(layer, q, k.bfloat16().float(), v.bfloat16().float(), *args, **given)


def one_by_one(runner: NativeRunner, module: Any) -> float:
    """The median distance of two tokens: an activation at the edge of two numbers misleads no other pair."""
    return float(np.median([distance(runner, module, [token, token + 1]) for token in range(40)]))


@pytest.mark.parametrize("form", daily(FORMATS, 1, 4))
def test_logits_of_stored_blocks_are_those_of_their_weights(form: str, tmp_path: Path) -> None:
    """But for activations in 8 bits and a cache in bfloat16; if the module's are rounded too, the same."""
    module, packed = stored(tmp_path, form)
    runner, whole = native(module, packing=packed), native(module)
    assert page_bytes(runner.model) * 2 == page_bytes(whole.model)
    assert 1e-4 < one_by_one(runner, module) < 0.06
    assert one_by_one(runner, with_rounded_inputs(module)) < 2e-6


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.1), ("q4", 0.6)])
def test_weights_quantised_when_loaded_are_near_the_modules(weights: str, most: float) -> None:
    """Widths that are no multiple of a group are filled up with zeros."""
    module = module_of()
    assert distance(native(module, packing=packing(weights)), module, sequence(60)) < most


def test_numbers_that_fit_a_format_come_back_unchanged(tmp_path: Path) -> None:
    """The module's weights lie in Q4_1 already: quantised again, they are those that are stored."""
    module, packed = stored(tmp_path, "q4_1")
    again = Packing("q4", "q4_1", "q4_1")
    logits = [native(module, packing=how).model.feed([0], [0], [sequence(40)]) for how in (packed, again)]
    assert np.array_equal(*logits)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", daily([*FORMATS, "int8"], 0, 2, 3, 5))
def test_a_tokens_bits_depend_on_no_width_row_slot_neighbour_or_number_of_threads(
    form: str, dtype: str, tmp_path: Path
) -> None:
    if form == "int8":
        module, packed = module_of("qwen3", DTYPES[dtype]), packing(form)
    else:
        module, packed = stored(tmp_path, form, DTYPES[dtype])
    check_bits(*(native(module, packing=packed, threads=threads) for threads in (2, 1, 3)))


@pytest.mark.parametrize("form", ["q8_0", "q4_1"])
def test_blocks_are_as_near_to_their_weights_as_arithmetic_promises(form: str) -> None:
    """Q8_0: within half a step. Q4_1: a block's squared error is at most that of its whole range kept."""
    library = load_library(compilation.library_path())
    for scale, middle in ((1.0, 0.0), (1e-3, 0.0), (0.1, 3.0), (1e-9, 0.0), (1000.0, 0.0)):
        dense = np.random.default_rng(5).standard_normal((40, 96), dtype=np.float32) * np.float32(scale) + np.float32(
            middle
        )
        own = gguf.quants.dequantize(encoded(library, dense, form).rows, gguf.GGMLQuantizationType[form.upper()])
        weights, off = (each.reshape(40, -1, 32) for each in (dense, own - dense))
        if form == "q8_0":
            step, error, more = np.abs(weights).max(-1) / 127, np.abs(off).max(-1), 0.0
        else:
            step, error = (weights.max(-1) - weights.min(-1)) / 15, np.sqrt(np.square(off).mean(-1))
            more = np.abs(weights).max(-1) * 2**-10
        assert (error <= step * (0.5 + 2**-7) + more + 2.0**-18).all()
    for value in (np.nan, np.inf, 1e8):
        dense[3, 3] = value
        with pytest.raises(CheckpointError, match="weights too large, or no numbers"):
            encoded(library, dense, form)


# A hash of a made-up model's logits in each format, by GGML's number (0: float32); the same on every CPU that fuses.
BITS = """\
0 2aac0cba29f31fe8
2 8b8dd370a5942ec4
3 123efebc96e513af
8 db8fe90c911e0683
12 e0d6df2fb855b0a5
14 a059c77b234c881d
"""


@pytest.mark.thorough  # compiling takes a minute
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", ["-march=native", "-march=x86-64-v3", "-march=armv8-a"])
def test_every_cpu_computes_the_same_bits(flags: str, tmp_path: Path) -> None:
    arm = "armv8" in flags and platform.machine() != "aarch64"
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++" if arm else "g++"), shutil.which("qemu-aarch64-static")
    if not compiler or (arm and not emulator) or ("x86" in flags and platform.machine() != "x86_64"):
        pytest.skip("needs g++, or qemu-user-static and g++-aarch64-linux-gnu")
    if "x86" in flags and "avx512_vnni" not in compilation.cpu_features():
        pytest.skip("-march=native takes the same path on this CPU")
    kept = [flag for flag in compilation.FLAGS if flag not in ("-march=native", "-shared", "-fPIC")]
    sources = [PROGRAM, compilation.SOURCES / "products.cpp"]
    made = [compiler, *kept, "-w", *flags.split(), *(["-static"] if arm else []), f"-I{compilation.SOURCES}", *sources]
    subprocess.run([*made, "-o", tmp_path / "bits"], check=True)
    command = [*([emulator] if arm and emulator else []), tmp_path / "bits"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout == BITS


def test_a_file_in_blocks_with_too_few_numbers_in_a_dense_matrix_is_refused(tmp_path: Path) -> None:
    module, packed = stored(tmp_path, "q8_0")
    rows = module.model.embed_tokens.weight
    module.model.embed_tokens.weight = torch.nn.Parameter(rows[:-1].detach().clone())
    with pytest.raises(CheckpointError, match=rf"model\.embed_tokens\.weight is \[{len(rows) - 1}, 256\], not"):
        native(module, packing=packed)


def test_a_file_in_another_format_is_refused_by_name(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q5_1
    blocks = gguf.quants.quantize(np.ones((4, 64), np.float32), kind)
    write_gguf(tmp_path / "m.gguf", "llama", {}, {"output.weight": (blocks, kind)})
    with pytest.raises(CheckpointError, match=r"output\.weight is stored as Q5_1; what runs as stored is Q4_0"):
        StoredWeights(tmp_path / "m.gguf").head()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": "int3"}, "weights: 'int3' is not one of auto, bfloat16"),
        ({"weights": "bfloat16", "dtype": "float32"}, "weights: bfloat16 contradicts dtype float32"),
        ({"weights": "int8", "compile": "off"}, "weights: int8 runs in native steps, not with compile off"),
        ({"weights": "q4", "device": "cuda"}, "weights: q4 runs on the CPU"),
        ({"weights": "q4", "tp_degree": 2}, "weights: q4 runs on the CPU, in one process"),
        ({"weights": "as-stored", "dtype": "float16"}, "weights: as-stored goes with dtype float32 or bfloat16"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Execution(**given)


def test_quantised_weights_never_run_as_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, auto runs module code; int8 is refused."""
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="weights: int8 needs native steps: no C"):
        load_runner(real.checkpoint(), Execution("cpu", "float32", 2, weights="int8"), Shape(1, 64, 2))


@pytest.mark.thorough
def test_a_gguf_file_is_unpacked_where_native_steps_cannot_run_or_a_dtype_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_runner(real.checkpoint(), Execution("cpu", "float32", 2), Shape(1, 64, 2)).identity.dtype == "float32"
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    identity = load_runner(real.checkpoint(), Execution("cpu", threads=2), Shape(1, 64, 2)).identity
    assert (identity.backend, identity.dtype) == ("torch", str(choose_dtype("auto", "cpu")).removeprefix("torch."))


def test_a_file_with_a_format_that_native_steps_do_not_read_is_not_run_as_stored(tmp_path: Path) -> None:
    def runs(*kinds: gguf.GGMLQuantizationType) -> bool:
        ones = np.ones((4, 64), np.float32)
        data = {f"blk.{n}.ffn_up.weight": (gguf.quants.quantize(ones, kind), kind) for n, kind in enumerate(kinds)}
        return StoredWeights(write_gguf(tmp_path / "m.gguf", "llama", {}, data)).runs_as_stored

    types = gguf.GGMLQuantizationType
    assert runs(types.Q4_0, types.Q8_0) and runs(types.Q4_0, types.F16) and runs(types.Q5_0, types.Q8_0)
    assert not runs(types.F16) and not runs(types.Q4_0, types.Q5_1)


def test_quantised_weights_are_refused_where_auto_finds_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tandem.runners.load_runner.choose_platform", lambda name: replace(CPU, name="cuda", automatic=("off",))
    )
    with pytest.raises(ValueError, match="weights: q4 runs on the CPU, and the device is cuda"):
        load_runner(real.checkpoint(), Execution(weights="q4"), Shape(1, 64, 2))


@pytest.mark.parametrize(
    ("weights", "name"), [("int8", "int8/float32"), ("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_the_identity_names_the_format(weights: str, name: str, tmp_path: Path) -> None:
    source = find(str(model_folder(tmp_path / "m", seed=5)))
    runner = load_runner(source, Execution("cpu", "auto", 2, weights=weights), Shape(1, 64, 2))
    assert runner.identity.dtype == name

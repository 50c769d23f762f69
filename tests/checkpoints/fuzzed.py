"""Mutated files of models, and what their readers make of each: python -m tests.checkpoints.fuzzed FOLDER COUNT SEED.

Prints JSON: how many of each kind were read and refused, errors other than CheckpointError, and the memory that was
needed. The process may take MOST_BYTES more than it has when it begins.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save

from tandem.checkpoints.adapter_files import AdapterChoice, read_adapter
from tandem.checkpoints.convert import is_eagle1
from tandem.checkpoints.gguf_blocks import StoredWeights
from tandem.checkpoints.head_config import is_head, read_head_config
from tandem.checkpoints.locate import CheckpointError, check_sizes, find, frequent_tokens
from tandem.checkpoints.scaled_weights import ScaledWeights, check_dense, quantisation_of
from tandem.checkpoints.tensors import Tensors
from tests.gguf_files import write_gguf

MOST_BYTES = 200 << 20
EXTREMES = (0, 1, 2, -1, 31, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *json.loads(
        '[null, true, "", "x", "F32", "I8", "..", [], {}, [0], [1, 2, 3], [[]], {"a": 1}, [null, "x", 1.5], 0.0]'
    ),
    *("a\n\ud800", "x" * 300, -1.5, 1e308, float("nan"), float("inf"), 10**30, 10**400, *EXTREMES),
)


def gguf_file(folder: Path) -> bytes:
    """A llama of one layer with values of every type, matrices in three formats and 8 tokens."""
    kinds = gguf.GGUFValueType
    values: dict[str, Any] = {
        **{"general.alignment": 32, "llama.block_count": 1, "a.bool": True, "llama.attention.head_count": 2},
        **{"llama.embedding_length": (32, kinds.UINT64), "llama.feed_forward_length": (32, kinds.INT64)},
        **{"llama.attention.head_count_kv": (1, kinds.UINT16), "llama.rope.freq_base": 1e4},
        **{"llama.epsilon": (1e-5, kinds.FLOAT64), "a.byte": (3, kinds.UINT8), "a.signed": (-3, kinds.INT32)},
        **{"tokenizer.ggml.tokens": ["t"] * 8, "tokenizer.ggml.scores": [0.5] * 8},
        "tokenizer.ggml.token_type": [1] * 8,
    }
    tensors: dict[str, Any] = {
        "blk.0.attn_v.weight": np.zeros((32, 32), np.float32),
        "blk.0.ffn_up.weight": np.zeros((32, 32), np.float16),
        "token_embd.weight": np.zeros((8, 32), np.float32),
    }
    formats = {"attn_q": "Q8_0", "attn_k": "Q4_0", "attn_output": "Q4_1", "ffn_gate": "Q8_0", "ffn_down": "Q8_0"}
    for name, form in formats.items():
        kind, rows = gguf.GGMLQuantizationType[form], 16 if name == "attn_k" else 32
        tensors[f"blk.0.{name}.weight"] = (gguf.quantize(np.zeros((rows, 32), np.float32), kind), kind)
    return write_gguf(folder / "made.gguf", "llama", values, tensors).read_bytes()


def read_gguf(folder: Path) -> None:
    checkpoint = find(str(folder / "m.gguf"))
    stored = StoredWeights(folder / "m.gguf")
    assert isinstance(stored.formats(), tuple) and isinstance(stored.runs_as_stored, bool)
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        if blocks := stored.matrix(0, name):
            blocks.rows.sum()
    if head := stored.head():
        head.rows.sum()
    check_sizes(checkpoint)


def read_tensors(folder: Path) -> None:
    tensors = Tensors(folder)
    assert tensors.sizes().keys() == tensors.files.keys()
    for name in tensors.files:
        assert tensors[name].shape == tensors.shape(name)
    check_dense(folder)


def read_scaled(folder: Path) -> None:
    weights = ScaledWeights(folder)
    assert weights["a.weight"].dtype == torch.float32
    weights.blocks("a.weight")


def read_folder(folder: Path) -> None:
    """What is read of a model folder before transformers is asked."""
    is_head(folder), is_eagle1(folder), quantisation_of(folder)
    checkpoint = find(str(folder))
    check_sizes(checkpoint)
    frequent_tokens(checkpoint, 32)


QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}}},
}
MODEL = {"num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 16, "quantization_config": QUANTISED}
SIZES = {
    **{"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16},
    **{"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "model_type": "llama"},
}
HEAD = {
    **SIZES,
    **{"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 8, "rope_scaling": {"rope_type": "default"}},
    **{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}},
}
ADAPTER = {
    **{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "use_rslora": False, "init_lora_weights": True},
    **{"rank_pattern": {r"(k|v)_proj": 3}, "alpha_pattern": {"layers.0.*q_proj": 2.5}, "target_modules": ["q_proj"]},
}
_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
LORA = save({f"{_Q}A.weight": torch.ones(2, 8), f"{_Q}B.weight": torch.ones(8, 2)})
DENSE = save({"a.weight": torch.ones(3, 8), "b": torch.ones(5, dtype=torch.bfloat16)}, {"format": "pt"})
SCALED = save({"a.weight": torch.ones(8, 64, dtype=torch.int8), "a.weight_scale": torch.ones(8, 2)})


@dataclass(frozen=True)
class Kind:
    """Files of a folder, which of them is mutated, and what reads the folder."""

    name: str
    file: str
    content: bytes
    others: dict[str, bytes]
    read: Callable[[Path], object]
    fields: Sequence[int] = ()  # places of numbers of 8 bytes


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def kinds(folder: Path) -> list[Kind]:
    weights, index = "model.safetensors", "model.safetensors.index.json"
    lora, config = "adapter_model.safetensors", "adapter_config.json"
    named = as_json({"weight_map": {"a.weight": weights, "b": weights}})
    made = gguf_file(folder)
    fields = [at for at in range(2000) if 0 < int.from_bytes(made[at : at + 8], "little") < 2**40]

    def read_eagle1(folder: Path) -> None:
        read_head_config(folder, eagle1=True)

    def adapter(folder: Path) -> None:
        read_adapter(AdapterChoice("a", str(folder)))

    return [
        Kind("gguf", "m.gguf", made, {}, read_gguf, fields),
        Kind("safetensors", weights, DENSE, {}, read_tensors, [0]),
        Kind("scaled safetensors", weights, SCALED, {"config.json": as_json(MODEL)}, read_scaled, [0]),
        Kind("adapter's safetensors", lora, LORA, {config: as_json(ADAPTER)}, adapter, [0]),
        Kind("adapter_config.json", config, as_json(ADAPTER), {lora: LORA}, adapter),
        Kind("config.json", "config.json", as_json(MODEL), {weights: SCALED}, read_folder),
        Kind("a head's config.json", "config.json", as_json(HEAD), {}, read_head_config),
        Kind("an EAGLE-1 head's config.json", "config.json", as_json(SIZES), {}, read_eagle1),
        Kind("an index", index, named, {weights: DENSE}, read_tensors),
        Kind(
            "frequent_tokens.json",
            "frequent_tokens.json",
            as_json([3, 1, 2]),
            {"config.json": as_json(SIZES), weights: DENSE},
            read_folder,
        ),
    ]


def mutated(kind: Kind, chance: random.Random) -> bytes:
    content = bytearray(kind.content)
    how = chance.choice(("flips", "cut", "field", "field", "splice"))
    begin = 8 if kind.file.endswith(".safetensors") else 0
    end = begin + int.from_bytes(content[:8], "little") if begin else len(content)
    if how == "field" and (kind.fields and (not begin or chance.random() < 0.2)):
        at, size = chance.choice(kind.fields), 8 if begin else chance.choice((1, 4, 8))
        content[at : at + size] = (chance.choice(EXTREMES) % 2**64).to_bytes(8, "little")[:size]
    elif how == "field":
        text = _changed_json(bytes(content[begin:end]), chance)
        content[:end] = (len(text).to_bytes(8, "little") if begin else b"") + text
    elif how == "flips":
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(end)] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[chance.randrange(len(content)) :]
    else:
        first, then = (sorted(chance.choices(range(end + 1), k=2)) for _ in range(2))
        content[slice(*first)] = content[slice(*then)]
    return bytes(content)


def _changed_json(text: bytes, chance: random.Random) -> bytes:
    """One value is another, is missing, has another name or is nested; or a name stands twice."""
    tree = {"": json.loads(text)}
    holder, key = chance.choice(list(_places(tree)))
    how = chance.random()
    if how < 0.8:
        holder[key] = copy.deepcopy(chance.choice(VALUES))
    elif how < 0.95 and holder is not tree:
        value = holder.pop(key)
        if how > 0.87 and isinstance(holder, dict):
            holder["another\n\x1b"] = value
    changed = json.dumps(tree[""]) if "" in tree else "{}"
    if how > 0.97:
        changed = changed.replace("[", "[" * chance.choice((60, 70, 2000, 200_000)), 1)
    elif how > 0.95:
        changed = changed.replace("{", f"{{{changed[1:-1]}, " if len(changed) > 2 and changed[0] == "{" else "{", 1)
    return changed.encode()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in JSON: what holds it, and under which key."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


def fuzz(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Reads `count` mutated files."""
    chance, every = random.Random(seed), kinds(folder)
    outcomes: dict[str, Counter[str]] = {kind.name: Counter() for kind in every}
    wrong: list[str] = []
    for kind in every:
        place = folder / kind.name
        place.mkdir()
        for name, content in {**kind.others, kind.file: kind.content}.items():
            (place / name).write_bytes(content)
        kind.read(place)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(count):
        kind = every[0] if number % 3 == 0 else chance.choice(every)
        (folder / kind.name / kind.file).write_bytes(mutated(kind, chance))
        try:
            kind.read(folder / kind.name)
            outcomes[kind.name]["read"] += 1
        except CheckpointError as error:
            outcomes[kind.name]["refused"] += 1
            if "\n" in str(error):
                wrong.append(f"{kind.name} {number}: more than a line: {error}")
        except BaseException as error:
            wrong.append(f"{kind.name} {number}: {type(error).__name__}: {error}"[:200])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    return {"outcomes": outcomes, "wrong": wrong, "grown_bytes": grown * 1024}


if __name__ == "__main__":
    print(json.dumps(fuzz(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))

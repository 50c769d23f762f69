"""GGUF files of the table's models: by gguf, with the keys that llama.cpp's converter gave, and by llama.cpp itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.checkpoints.tokenizers import byte_characters

RECORDED = Path(__file__).with_name("recorded.json")
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ2_0")
QUANTISED = ("Q2_K", "Q3_K_S", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "Q5_0", "Q4_0")
PERMUTED = ("llama", "granite", "smollm3")
SHIFTED = ("gemma", "gemma2", "gemma3")
SPECIAL = ("<pad>", "<s>", "</s>")


def _keys(path: Path) -> dict[str, Any]:
    """The keys that shape the model: [type, type of a list's values, value]."""
    fields = gguf.GGUFReader(path).fields
    kept = {name: each for name, each in fields.items() if name.partition(".")[0] not in ("GGUF", "tokenizer", "split")}
    return {
        name: [each.types[0].name, each.types[-1].name, each.contents()]
        for name, each in kept.items()
        if not name.startswith("general.") or name == "general.architecture"
    }


def recorded(path: Path) -> dict[str, Any]:
    """What is kept of a converter's file: its keys, and tensors that no weights are."""
    made = [each for each in gguf.GGUFReader(path).tensors if each.name.startswith(("rope_f",))]
    return {"keys": _keys(path), "tensors": {each.name: each.data.tolist() for each in made}}


def _permuted(values: Any, heads: int, back: bool = False) -> Any:
    """Rows of queries and keys, turned in neighbouring pairs instead of halves; or `back`."""
    order = (heads, values.shape[0] // heads // 2, 2) if back else (heads, 2, values.shape[0] // heads // 2)
    return values.reshape(*order, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _changed(arch: str, name: str, values: Any, config: Any, back: bool = False) -> Any:
    if arch in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return _permuted(values, heads, back)
    if arch in SHIFTED and name.endswith("norm.weight"):
        return values - np.float32(1) if back else values + np.float32(1)
    return values


def _names(arch: str, module: Any) -> dict[str, str]:
    """GGUF's names of the module's weights."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, module.config.num_hidden_layers)
    found = {name: names.get_name(name, (".weight", ".bias")) for name in module.state_dict()}
    tied = {"lm_head.weight"} if module.config.tie_word_embeddings else set()
    return {name: to for name, to in found.items() if to and "_exps" not in to and name not in tied}


def vocabulary() -> list[str]:
    """The tokens of every model: three special ones, bytes, and pairs of letters."""
    pairs = [one + other for one in "etaoins" for other in "etaoinsr"]
    return [*SPECIAL, *byte_characters(), *pairs, *(f"<spare{i}>" for i in range(320 - 3 - 256 - len(pairs)))]


def write(path: Path, module: Any, kept: Mapping[str, Any], kind: str = "F32", split: int = 0) -> Path:
    """Writes the module's weights as `kind`, with a converter's keys; returns the (first) file."""
    arch = kept["keys"]["general.architecture"][2]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    for name, (first, last, value) in kept["keys"].items():
        if name != "general.architecture":
            writer.add_key_value(name, value, gguf.GGUFValueType[first], gguf.GGUFValueType[last])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens := vocabulary())
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in tokens if len(token) == 2])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    state, wanted = module.state_dict(), gguf.GGMLQuantizationType[kind]
    for name, to in _names(arch, module).items():
        values = _changed(arch, name, state[name].numpy(), module.config)
        fits = values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        own = wanted if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(to, quantize(np.ascontiguousarray(values), own), raw_dtype=own)
    for name, values in kept["tensors"].items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-0*.gguf"))[0] if split else path


def reference(files: Sequence[Path], module: Any) -> Any:
    """A copy of the module with the weights that the files hold, in float32."""
    import copy

    import torch

    stored = {each.name: each for file in files for each in gguf.GGUFReader(file).tensors}
    arch = gguf.GGUFReader(files[0]).fields["general.architecture"].contents()
    made = copy.deepcopy(module)
    state = made.state_dict()
    for name, to in _names(arch, module).items():
        tensor = stored[to]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(tuple(state[name].shape))
        with torch.no_grad():
            state[name].copy_(torch.from_numpy(_changed(arch, name, values, module.config, back=True).copy()))
    return made


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of `vocabulary` in a model's folder, for the converter."""
    tokens = vocabulary()
    pairs = [(token[0], token[1]) for token in tokens if len(token) == 2]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


CONVERTER = """
import importlib, runpy, sys
home = sys.argv[1]
sys.path[:0] = [home, home + "/gguf-py"]
import transformers
from conversion.base import TextModel
transformers.AutoTokenizer.from_pretrained = transformers.PreTrainedTokenizerFast.from_pretrained
for name in ("gemma", "granite", "llama", "olmo", "phi", "qwen", "stablelm"):
    importlib.import_module("conversion." + name)
def kinds(kind):
    yield kind
    for each in kind.__subclasses__():
        yield from kinds(each)
for kind in kinds(TextModel):  # the vocabulary is ours, whatever the family's is
    kind.get_vocab_base_pre = lambda self, tokenizer: "smollm"
    if "set_vocab" in vars(kind):
        kind.set_vocab = lambda self: self._set_vocab_gpt2()
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(home + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def convert(source: Path, folder: Path, path: Path, kind: str = "f32") -> Path:
    """Runs the converter of llama.cpp's `source` on a model's folder."""
    write_tokenizer(folder)
    command = [sys.executable, "-c", CONVERTER, str(source), str(folder), "--outfile", str(path), "--outtype", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return path


def quantised(program: Path, path: Path, kind: str) -> Path:
    """Runs llama-quantize."""
    made = path.with_name(f"{path.stem}-{kind}.gguf")
    command = [str(program), "--pure", str(path), str(made), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"llama-quantize {kind}: {done.stderr.strip().splitlines()[-1]}")
    return made

"""A stand-in for NxD Inference: its names, and its rules of batches, masks, buckets and routing, over toy logits.

What goes wrong on NxDI goes wrong here the same way: rows of a full batch belong to the line of their index, missing
rows repeat the first into idle lines, position 0 makes a prefill of everything, a mask shows exactly what it says.
The real code is run by test_real_source.py where it is at hand.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from tests.checkpoints.heads import eagle1_folder, eagle1_tensors, eagle3_folder, eagle3_tensors
from tests.toy import VOCAB_SIZE, ToyConfig, adapted, toy_logits

PAD = -1  # acceptance_padding_token
LOADED: list[Application] = []
COMPILED: list[Application] = []


class LoraServingConfig:
    """What a line is encoded with is numbered by the order of the paths, from 1 with enable_base_model_only."""

    def __init__(
        self,
        lora_ckpt_paths: dict[str, str] | None = None,
        enable_base_model_only: bool = False,
        batch_size: int = 1,
        max_loras: int = 1,
        **kwargs: Any,
    ) -> None:
        self.names = [*([""] if enable_base_model_only else []), *(lora_ckpt_paths or {})]
        self.batch_size, self.max_loras = batch_size, max(max_loras + enable_base_model_only, len(self.names))


class NeuronConfig:
    """Keywords as attributes, with the defaults that matter."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        defaults = {"batch_size": 1, "seq_len": 128, "speculation_length": 0, "torch_dtype": "bfloat16"}
        defaults |= dict.fromkeys(("enable_eagle_speculation", "enable_bucketing", "output_logits", "quantized"), False)
        defaults |= dict.fromkeys(("apply_seq_ids_mask", "is_continuous_batching", "is_eagle3"), False)
        defaults |= dict.fromkeys(("is_eagle_draft", "sequence_parallel_enabled", "enable_fused_speculation"), False)
        buckets = ("context_encoding_buckets", "token_generation_buckets", "on_device_sampling_config")
        vars(self).update(defaults | dict.fromkeys(buckets) | given)
        self.max_length = given.get("max_length", self.seq_len)
        self.max_context_length = given.get("max_context_length", self.seq_len)
        self.ctx_batch_size = given.get("ctx_batch_size", self.batch_size)
        self.enable_fused_speculation = self.enable_fused_speculation or self.enable_eagle_speculation
        self.lora_config = LoraServingConfig(**given["lora_config"]) if given.get("lora_config") else None
        assert not self.quantized or given.get("quantized_checkpoints_path"), "quantized_checkpoints_path is required"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class InferenceConfig:
    def __init__(self, neuron_config: NeuronConfig, fused_spec_config: Any = None, load_config: Any = None) -> None:
        self.neuron_config, self.fused_spec_config = neuron_config, fused_spec_config
        load_config(self)

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig


class FusedSpecNeuronConfig:
    def __init__(
        self, worker_cls: Any, draft_config: Any = None, draft_model_path: Any = None, draft_model_cls: Any = None
    ) -> None:
        self.worker_cls, self.draft_config = worker_cls, draft_config
        self.draft_model_path, self.draft_model_cls = draft_model_path, draft_model_cls


def load_pretrained_config(path: str | None = None, hf_config: Any = None) -> Callable[[Any], None]:
    def load(config: Any) -> None:
        read = json.loads((Path(path) / "config.json").read_text()) if path else vars(hf_config)
        config.toy = ToyConfig(**read["_toy"])
        config.rope_theta = read.get("rope_theta", 10000.0)

    return load


def prepare_sampling_params(
    batch_size: int, top_k: Any = (1,), top_p: Any = (1.0,), temperature: Any = (1.0,)
) -> Tensor:
    columns = [torch.tensor(each) for each in (top_k, top_p, temperature)]
    return torch.stack([c.broadcast_to(batch_size) if len(c) == 1 else c for c in columns], dim=1)


class Application:
    """NeuronBaseForCausalLM. `calls` records every forward's keywords."""

    _model_cls = "NeuronLlamaModel"
    _FUSED_PREFIX = ""

    def __init__(self, model_path: str, config: InferenceConfig | None = None) -> None:
        assert config is not None
        self.model_path, self.config, self.neuron_config = model_path, config, config.neuron_config
        self.calls: list[dict[str, Any]] = []
        n = self.neuron_config
        if n.is_continuous_batching:
            assert n.ctx_batch_size == 1, "only supports single seq_id"
        self.caches = {"target": self._cache(), "draft": self._cache()}
        self.prefix_at_load = ""
        lora = n.lora_config
        self.active = [0] * lora.batch_size if lora else []  # the adapter of each line, as its last prompt chose it

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return InferenceConfig

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig

    @classmethod
    def save_quantized_state_dict(cls, model_path: str, config: InferenceConfig) -> None:
        Path(config.neuron_config.given["quantized_checkpoints_path"]).mkdir()

    def compile(self, path: str) -> None:
        (Path(path) / "model.pt").write_text("graphs")
        (Path(path) / "neuron_config.json").write_text("{}")
        COMPILED.append(self)

    def load(self, path: str) -> None:
        assert (Path(path) / "model.pt").is_file()
        self.prefix_at_load = type(self)._FUSED_PREFIX
        if self.neuron_config.enable_fused_speculation:
            type(self)._FUSED_PREFIX = "target_model"
        elif self.prefix_at_load:
            raise KeyError("model.embed_tokens.weight")
        LOADED.append(self)

    def _cache(self) -> list[list[int]]:
        return [[-9] * (self.neuron_config.max_length + 128) for _ in range(self.neuron_config.batch_size)]

    # --- forward ---

    def forward(
        self,
        input_ids: Tensor,
        seq_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        sampling_params: Tensor | None = None,
        adapter_ids: Tensor | None = None,
    ) -> Any:
        assert seq_ids is not None and attention_mask is not None and position_ids is not None
        self.calls.append(
            {
                "input_ids": input_ids.tolist(),
                "seq_ids": seq_ids.tolist(),
                "attention_mask": attention_mask.clone(),
                "position_ids": position_ids.tolist(),
                "sampling_params": None if sampling_params is None else sampling_params.clone(),
                **({} if adapter_ids is None else {"adapter_ids": adapter_ids.tolist()}),
            }
        )
        assert adapter_ids is None or adapter_ids.shape == seq_ids.shape
        if sampling_params is None or len(sampling_params) != len(input_ids):
            raise RuntimeError("Input shape not found in input_shape_map")
        if position_ids.min() == 0:
            for row, line in enumerate([] if adapter_ids is None else seq_ids.tolist()):
                self.active[line] = int(adapter_ids[row])  # type: ignore[index]
            return self._outputs(self._prefills(input_ids, attention_mask, position_ids, seq_ids), prefill=True)
        n = self.neuron_config
        if n.enable_fused_speculation:
            return self._fused(input_ids, attention_mask, position_ids, seq_ids)
        if input_ids.shape[1] == n.speculation_length or (not n.speculation_length and input_ids.shape[1] == 1):
            return self._outputs(self._decode(input_ids, attention_mask, position_ids, seq_ids), prefill=False)
        raise AttributeError("'NeuronLlamaForCausalLM' object has no attribute 'token_generation_model'")

    def _outputs(self, logits: np.ndarray, prefill: bool) -> Any:
        values = torch.tensor(logits)
        n = self.neuron_config
        if n.enable_fused_speculation:
            first = values[:, 0].argmax(-1)[:, None]
            rest = torch.full((len(first), n.speculation_length - 1), PAD)
            lengths = self.calls[-1]["attention_mask"].sum(1)[:, None]
            return types.SimpleNamespace(logits=None, fused_outputs=[torch.cat([first, rest], 1), first, None, lengths])
        if n.on_device_sampling_config is None:
            return types.SimpleNamespace(logits=values, tokens=values, hidden_states=values)
        tokens = values.argmax(-1).to(torch.int32)
        tokens = tokens[:, 0] if prefill or not n.speculation_length else tokens
        return types.SimpleNamespace(logits=values if n.output_logits else None, tokens=tokens)

    def _prefills(self, ids: Tensor, mask: Tensor, positions: Tensor, seq_ids: Tensor) -> np.ndarray:
        """One row after the other through the batch-1 graph, padded to its bucket with id 0, mask 0, position 1."""
        buckets = self._buckets(self.neuron_config.context_encoding_buckets, context=True)
        bucket = self._bucket(mask.shape[1], buckets, 0)
        rows = []
        if self.neuron_config.is_eagle3 and not self.neuron_config.sequence_parallel_enabled:
            raise RuntimeError("einsum(): subscript m has size 64 for operand 1 which does not broadcast with size 0")
        for r in range(len(ids)):
            assert bucket != self.neuron_config.speculation_length, "traced as a verification"
            missing = bucket - ids.shape[1]
            row = [*ids[r].tolist(), *[0] * missing]
            shown = [*mask[r].tolist(), *[0] * missing]
            at = [*positions[r].tolist(), *[1] * missing]
            index = at.index(max(at))
            for cache in self.caches.values():
                cache[int(seq_ids[r])][:bucket] = row
            visible = [t for t, m in zip(row[: index + 1], shown, strict=False) if m]
            visible += [] if shown[index] else [row[index]]
            rows.append([toy_logits(self._adapted(int(seq_ids[r]), visible), self.config.toy)])
        return np.array(rows)

    def _decode(self, ids: Tensor, mask: Tensor, positions: Tensor, seq_ids: Tensor) -> np.ndarray:
        """Row i of a full batch is line i; a partial batch is filled up with its first row, and sorted."""
        n = self.neuron_config
        self._bucket(mask.shape[1], self._buckets(n.token_generation_buckets), n.speculation_length)
        lines = self._lines(seq_ids)
        answers = {
            line: self._row("target", line, ids[r].tolist(), mask[r].tolist(), positions[r].tolist(), self.config.toy)
            for line, r in lines.items()
        }
        order = range(len(ids)) if len(ids) == self.neuron_config.batch_size else seq_ids.tolist()
        return np.array([answers[line] for line in order])

    def _lines(self, seq_ids: Tensor) -> dict[int, int]:
        """Line to the row that it is run with."""
        lines = self.neuron_config.batch_size
        if len(seq_ids) == lines:
            return {line: line for line in range(lines)}
        rows = {int(line): r for r, line in enumerate(seq_ids)}
        idle = {} if self.neuron_config.apply_seq_ids_mask else dict.fromkeys(set(range(lines)) - set(rows), 0)
        return rows | idle

    def _row(
        self, which: str, line: int, ids: list[int], mask: list[int], positions: list[int], toy: ToyConfig
    ) -> list[np.ndarray]:
        cache = self.caches[which][line]
        before = [cache[s] for s, shown in enumerate(mask) if shown]
        read = [[max(t, 0) for t in [*before, *ids[: i + 1]]] for i in range(len(ids))]
        said = [toy_logits(self._adapted(line, tokens), toy) for tokens in read]
        for token, position in zip(ids, positions, strict=True):
            cache[position] = token
        return said

    def _adapted(self, line: int, tokens: list[int]) -> list[int]:
        """What the line's adapter makes of tokens that it sees."""
        lora = self.neuron_config.lora_config
        name = lora.names[self.active[line]] if lora and lora.names else ""
        return adapted(tokens, f"toy:{name}") if name else tokens

    def _fused(self, ids: Tensor, mask: Tensor, positions: Tensor, seq_ids: Tensor) -> Any:
        n, k = self.neuron_config, self.neuron_config.speculation_length
        self._bucket(mask.shape[1], self._buckets(n.token_generation_buckets), k)
        assert ids.shape[1] == 1, "fused speculation takes one token"
        draft_toy = self.config.fused_spec_config.draft_config.toy
        accepted, following = {}, {}
        for line, r in self._lines(seq_ids).items():
            position, shown = int(positions[r, 0]), mask[r].tolist()
            drafts = [int(ids[r, 0])]
            for i in range(k):
                before = [1] * (position + i) if i else shown
                (logits,) = self._row("draft", line, drafts[-1:], before, [position + i], draft_toy)
                drafts.append(int(logits.argmax()))
            at = list(range(position, position + k))
            said = [int(x.argmax()) for x in self._row("target", line, drafts[:k], shown, at, self.config.toy)]
            count = next((i for i in range(k - 1) if drafts[i + 1] != said[i]), k - 1) + 1
            accepted[line], following[line] = said[:count] + [PAD] * (k - count), position + count
        order = range(len(ids)) if len(ids) == n.batch_size else seq_ids.tolist()
        said, ends = torch.tensor([accepted[x] for x in order]), torch.tensor([[following[x]] for x in order])
        return types.SimpleNamespace(logits=None, fused_outputs=[said, None, None, ends])

    def _buckets(self, given: list[int] | None, context: bool = False) -> list[int]:
        longest = self.neuron_config.max_context_length if context else self.neuron_config.max_length
        return given if given and self.neuron_config.enable_bucketing else [longest]

    def _bucket(self, length: int, buckets: list[int], reserved: int) -> int:
        found = next((b for b in buckets if length + reserved < b), None)
        if found is None and length + reserved == buckets[-1]:
            return buckets[-1]
        if found is None:
            raise ValueError(f"Input len {length} exceeds largest bucket ({buckets[-1]})")
        return found


class NeuronLlamaForCausalLM(Application):
    """A class of its own, as every family's is."""


class NeuronQwen3ForCausalLM(Application):
    _model_cls = "NeuronQwen3Model"


class QuantizationType:
    def __init__(self, value: str) -> None:
        self.value = value


class KVQuantizationConfig:
    def __init__(self, **kwargs: Any) -> None:
        self.given = kwargs


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in where NxD Inference would be."""
    inference = "neuronx_distributed_inference"
    contents: dict[str, dict[str, Any]] = {
        "torch_neuronx": {},
        "neuronx_distributed.quantization.quantization_config": {
            "KVQuantizationConfig": KVQuantizationConfig,
            "QuantizationType": QuantizationType,
        },
        f"{inference}.models.config": {"FusedSpecNeuronConfig": FusedSpecNeuronConfig},
        f"{inference}.models.llama.modeling_llama": {"NeuronLlamaForCausalLM": NeuronLlamaForCausalLM},
        f"{inference}.models.qwen3.modeling_qwen3": {"NeuronQwen3ForCausalLM": NeuronQwen3ForCausalLM},
        f"{inference}.modules.generation.sampling": {"prepare_sampling_params": prepare_sampling_params},
        f"{inference}.utils.hf_adapter": {"load_pretrained_config": load_pretrained_config},
    }
    parents = {name.rsplit(".", up)[0]: {} for name in contents for up in range(name.count("."), 0, -1)}
    for name, attributes in (parents | contents).items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for cls in (Application, NeuronLlamaForCausalLM, NeuronQwen3ForCausalLM):
        monkeypatch.setattr(cls, "_FUSED_PREFIX", "")
    LOADED.clear()
    COMPILED.clear()


def model_folder(
    parent: Path, name: str, salt: int = 0, miss: float = 0.0, model_type: str = "llama", **config: Any
) -> Path:
    """A checkpoint as far as nxdi reads one without NxDI: config.json and something to hash."""
    folder = parent / name
    folder.mkdir()
    toy = {"salt": salt, "miss": miss}
    facts = {"model_type": model_type, "vocab_size": VOCAB_SIZE, "eos_token_id": 257, "dtype": "bfloat16", "_toy": toy}
    (folder / "config.json").write_text(json.dumps(facts | config))
    weights = {"model.layers.0.mlp.up_proj.weight": np.ones((2, 2), np.float32), name: np.ones(1, np.float32)}
    save_file(weights, folder / "model.safetensors")
    return folder


def as_eagle_head(folder: Path) -> Path:
    """Makes a checkpoint's folder that of a whole EAGLE-1 head, as far as nxdi reads one without NxDI."""
    config = json.loads((folder / "config.json").read_text())
    tensors = eagle1_tensors(vocabulary=config["vocab_size"])
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    return eagle1_folder(folder, tensors, **config)


def as_eagle3_head(folder: Path, target: Path) -> Path:
    """Makes a checkpoint's folder that of a whole EAGLE-3 head, and gives its target sizes that one can be beside."""
    config = json.loads((folder / "config.json").read_text())
    vocabulary = config["vocab_size"]
    tensors = eagle3_tensors(vocabulary, vocabulary, "layers.0")
    tensors["embed_tokens.weight"] = tensors["lm_head.weight"].clone()
    own = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 8, "hidden_size": 8}
    (target / "config.json").write_text(json.dumps(own))
    return eagle3_folder(folder, tensors, **config)

"""Tiny models, heads and adapters for real_source.py, and what transformers says of them alone."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96
ADAPTED = ("q_proj", "v_proj", "o_proj", "down_proj")


def tiny(folder: Path, kind: str, seed: int, like: Any = None, noise: float = 0.0, **fields: Any) -> Any:
    """A checkpoint with random weights; `like` another one, with noise on top. `fields` of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": VOCABULARY - 1,
        "bos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.4,
        **fields,
    }
    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = classes[kind]
    model = model_class(config_class(**shape)).float().eval()
    if like is not None:
        for own, other in zip(model.parameters(), like.parameters(), strict=True):
            own.data = other.data + noise * own.data
    model.save_pretrained(folder)
    return model


def dequantised(model: Any, folder: Path) -> Any:
    """Returns a copy of the model with matrices rounded to int8, one scale for each output; not lm_head."""
    from transformers import LlamaForCausalLM

    model.save_pretrained(folder)
    copied = LlamaForCausalLM.from_pretrained(folder).float().eval()
    for name, module in copied.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            scale = module.weight.data.abs().amax(1, keepdim=True) / 127.0
            module.weight.data = torch.clamp(torch.round(module.weight.data / scale), -128, 127) * scale
    return copied


def as_5_writes(folder: Path) -> None:
    """Rewrites config.json's rotary embedding the way transformers 5 does."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling")}
    file.write_text(json.dumps(config))


def eagle_head(folder: Path, target: Path) -> None:
    """An EAGLE1 draft: one layer, embeddings of its own, fc, no final norm, untrained; completed by --role convert."""
    from safetensors.torch import load_file, save_file

    from tandem.checkpoints.convert import run_convert

    published = folder.with_name("published")
    model = tiny(published, "llama", 4)
    weights = load_file(published / "model.safetensors")
    left_out = ("model.norm.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight")
    kept = {name: value for name, value in weights.items() if ".layers.1." not in name and name not in left_out}
    kept["fc.weight"] = torch.randn(64, 128) * 0.1
    save_file(kept, published / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"num_hidden_layers": 1}
    (published / "config.json").write_text(json.dumps(config, default=str))
    with contextlib.redirect_stdout(sys.stderr):
        run_convert(published, folder, "eagle", target)


def eagle3_head(folder: Path, target: Path) -> None:
    """An untrained EAGLE-3 head that drafts every second token, in SpecForge's layout; completed by --role convert."""
    from safetensors.torch import save_file

    from tandem.checkpoints.convert import run_convert
    from tandem.checkpoints.head_config import HeadConfig, write_head_config

    published = folder.with_name(f"{folder.name}-published")
    published.mkdir()
    write_head_config(published, HeadConfig(64, 4, 2, 16, 96, VOCABULARY, VOCABULARY // 2, 64), "float32")
    torch.manual_seed(6)
    shapes = {"self_attn.q_proj": (64, 128), "self_attn.k_proj": (32, 128), "self_attn.v_proj": (32, 128)}
    shapes |= {
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (96, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
    }
    made = {f"midlayer.{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    made |= {name: torch.ones(64) for name in ("norm.weight", *(f"midlayer.{norm}.weight" for norm in norms))}
    made |= {"fc.weight": 0.1 * torch.randn(64, 192), "lm_head.weight": torch.randn(VOCABULARY // 2, 64)}
    save_file(made | {"d2t": torch.arange(VOCABULARY // 2)}, published / "model.safetensors", metadata={"format": "pt"})
    with contextlib.redirect_stdout(sys.stderr):
        run_convert(published, folder, "eagle", target)


def alone(model: Any, prompt: list[int], sampling: Any, count: int) -> list[int]:
    """Plain decoding by transformers, the whole prefix every time, with our draws."""
    from tandem.speculation.draws import draw

    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].float().numpy()
        tokens.append(draw(logits, sampling, len(tokens)))
    return tokens[len(prompt) :]


def fp8(model: Any, folder: Path) -> Any:
    """Writes the model with the last layer's MLP in FP8, as Llama-3.1-405B's checkpoint has most; returns it so."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    tensors, copied = load_file(folder / "model.safetensors"), copy.deepcopy(model)
    for name, module in copied.model.layers[-1].mlp.named_children():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.data.abs().amax(1, keepdim=True) / 240.0
            stored = (module.weight.data / scale).to(torch.float8_e4m3fn)
            module.weight.data = stored.float() * scale
            whole = f"model.layers.{len(copied.model.layers) - 1}.mlp.{name}.weight"
            tensors |= {whole: stored, f"{whole}_scale": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return copied


def adapter(folder: Path, model: Any, seed: int, rank: int) -> Any:
    """Writes a LoRA adapter as PEFT does, and returns the model with it merged in."""
    from tests.adapters import linears, lora_tensors, write_adapter

    tensors = lora_tensors(model, seed, rank, ADAPTED)
    write_adapter(folder, tensors, r=rank, lora_alpha=2 * rank, target_modules=list(ADAPTED))
    merged = copy.deepcopy(model)
    for path, linear in linears(merged, ADAPTED).items():
        down, up = (tensors[f"base_model.model.{path}.lora_{part}.weight"] for part in "AB")
        linear.weight.data += 2.0 * up @ down
    return merged

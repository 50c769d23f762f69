"""Makes a transformers module from tensors in our own representation: numbers times scales."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tandem.checkpoints.numbers import Stored

if TYPE_CHECKING:
    from tandem.checkpoints.scaled_weights import ScaledWeights


def tensor_of(stored: Stored) -> torch.Tensor:
    """A tensor in numpy's memory; a copy if that is read-only."""
    values = stored.values if stored.values.flags.writeable else stored.values.copy()
    made = torch.from_numpy(values)
    return made.view(torch.bfloat16) if stored.dtype == "BF16" else made


def configuration(folder: Path) -> Any:
    """The configuration in `folder`, without its quantisation."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    config.__dict__.pop("quantization_config", None)
    return config


def module_from(folder: Path, config: Any, weights: ScaledWeights, dtype: torch.dtype) -> Any:
    """A module on the CPU with slot attention and these weights. Raises ValueError for missing or unused ones."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    from tandem.runners.torch.kernels import ATTENTION, register_attention
    from tandem.runners.torch.module_checks import refuse_weights

    register_attention()
    with init_empty_weights(include_buffers=False):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    names = [name for name in shapes if name in weights]
    unused = [name for name in weights.names() if name not in shapes and not name.endswith("rotary_emb.inv_freq")]
    refuse_weights((), unused, [name for name in names if weights.shape(name) != shapes[name]])
    module.load_state_dict({name: weights[name].to(dtype) for name in names}, strict=False, assign=True)
    module.tie_weights()
    refuse_weights([name for name, parameter in module.named_parameters() if parameter.is_meta])
    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder)
    return module.eval().requires_grad_(False)

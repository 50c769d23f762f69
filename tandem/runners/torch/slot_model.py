"""Runs a transformers model on a slot cache: static shapes, no host reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tandem.runners.eagle.hidden_states import TargetFeatures, decoder_layers, tap
from tandem.runners.families import check_fits
from tandem.runners.torch.kernels import ATTENTION, attention_rows, can_pack, pack_linears, register_attention
from tandem.runners.torch.module_adapters import TorchAdapters
from tandem.runners.torch.platforms import Platform, platform_of
from tandem.runners.torch.slot_cache import GatheredSlots, SlotCache

if TYPE_CHECKING:
    from tandem.checkpoints.scaled_weights import ScaledWeights

log = logging.getLogger("tandem.engine")


class TorchModel:
    """A causal language model whose rows live in slots; padding rows use the spare slot.

    `only`: the head's tokens; logits column j is token only[j]. `packed`: linear layers in oneDNN's layout, unless a
    compiler packs them. `platform`: overrides that of `device`. `ranks`: processes that share the heads. `on_demand`:
    slots take memory as they are written (eager steps on the CPU).
    """

    ids = torch.int64  # dtype of `tensor`

    def __init__(
        self,
        module: Any,
        slots: int,
        max_length: int,
        widest: int,
        device: str,
        only: Sequence[int] | None = None,
        packed: bool = True,
        platform: Platform | None = None,
        ranks: int = 1,
        on_demand: bool = False,
    ) -> None:
        config = module.config
        check_fits(config, max_length, ranks)
        self.module: Any = module.eval()
        fix_rotary(module, max_length)
        self.platform, self.ranks = platform or platform_of(device), ranks
        self.draft_vocab = None if only is None else torch.tensor(only, dtype=self.ids, device=device)
        if self.draft_vocab is not None:
            _narrow_head(module, self.draft_vocab)
        self.dtype: torch.dtype = next(module.parameters()).dtype
        counts = [value for key, value in config.to_dict().items() if "expert" in key and type(value) is int]
        self.experts = any(count > 1 for count in counts)
        self.device = device
        if packed and ranks == 1 and self.platform.packs and can_pack(self.dtype):
            pack_linears(self.module)
        self.vocab_size = int(config.vocab_size)
        self.groups = int(config.num_attention_heads) // int(
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )
        self.slots = SlotCache(config, slots, max_length, widest, self.dtype, self.platform, ranks, on_demand)
        self.spare = self.slots.spare
        self.columns = torch.arange(self.slots.length, dtype=self.ids, device=device)
        self._hidden = torch.tensor(torch.finfo(self.dtype).min, dtype=self.dtype, device=device)
        self._shown = torch.tensor(0.0, dtype=self.dtype, device=device)
        self.layers: tuple[int, ...] = ()  # whose hidden states `features` [slots, length, width] get
        self.features: Tensor | None = None
        self.adapters = TorchAdapters(self.module, device)

    @torch.inference_mode()
    def forward(
        self,
        slots: Sequence[int],
        tokens: Tensor,
        starts: Tensor,
        length: int | None = None,
        head: bool = True,
        adapters: Sequence[int] = (),
    ) -> Tensor:
        """Logits [rows, width, vocabulary] of tokens [rows, width] at positions starts [rows].

        head=False returns hidden states [rows, width, hidden]. Attention reads the first `length` positions (default:
        all). `adapters`: of the first rows; 0: none.
        """
        length = length or self.slots.length
        positions = self._positions(starts, tokens.shape[1])
        self.slots.plan(list(slots), positions, length)
        with self.adapters.of_rows(adapters):
            out = self._run(tokens, positions, length, self.slots.cache, head)
        if self.features is not None:
            which = torch.tensor(list(slots), device=positions.device)
            self.features[which[:, None], positions] = self.slots.cache.caught_after(self.layers)
        return out

    @property
    def layer_count(self) -> int:
        return len(decoder_layers(self.module))

    @property
    def hidden_size(self) -> int:
        return int(self.module.config.hidden_size)

    def hand_out(self, layers: Sequence[int]) -> TargetFeatures:
        """Steps also keep the hidden states after `layers` from now on."""
        embedding = self.module.get_input_embeddings().weight
        shape = (self.slots.spare + 1, self.slots.length, len(layers) * embedding.shape[1])
        self.features = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.layers = tuple(layers)
        tap(self.module, layers)
        return TargetFeatures(self.features, embedding)

    def traced(
        self, buffers: Sequence[Tensor], slots: Tensor, tokens: Tensor, starts: Tensor, head: bool = True
    ) -> Tensor:
        """Like `forward`, for graphs: slots [rows] are a tensor, the cache's `buffers` and the features arguments."""
        positions, length = self._positions(starts, tokens.shape[1]), self.slots.length
        cache = GatheredSlots(buffers, slots, positions, length)
        out = self._run(tokens, positions, length, cache, head)
        if self.layers:
            cache.store(buffers[-1], self.layers)
        return out

    def _run(self, tokens: Tensor, positions: Tensor, length: int, cache: object, head: bool) -> Tensor:
        run = self.module if head else self.module.base_model
        out = run(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._mask(positions, length),
            past_key_values=cache,
            use_cache=True,
        )
        return out.logits if head else out.last_hidden_state

    def _positions(self, starts: Tensor, width: int) -> Tensor:
        return starts[:, None] + self.columns[:width][None]

    def _mask(self, positions: Tensor, length: int) -> Tensor:
        """Additive causal mask [rows, 1, attention_rows, length]."""
        width = positions.shape[1]
        seen = self.columns[None, None, :length] <= positions[:, :, None]
        mask = torch.where(seen, self._shown, self._hidden).repeat(1, self.groups, 1)
        padding = attention_rows(width, self.groups) - width * self.groups
        return nn.functional.pad(mask, (0, 0, 0, padding))[:, None]

    def tokens_of(self, columns: Tensor) -> Tensor:
        """Token ids of logits columns; same shape."""
        if self.draft_vocab is None:
            return columns
        return self.draft_vocab.index_select(0, columns.reshape(-1)).view(columns.shape)

    def tensor(self, values: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=self.ids, device=self.device)


def to_host(values: Tensor) -> list[list[int]]:
    """Copies integers [n, m] from the device, once per step."""
    rows: list[list[int]] = values.tolist()
    return rows


def _narrow_head(module: Any, only: Tensor) -> None:
    head = module.get_output_embeddings()
    narrow = nn.Linear(head.in_features, len(only), bias=head.bias is not None, device="meta")
    narrow.weight = nn.Parameter(head.weight[only].clone(), requires_grad=False)
    if head.bias is not None:
        narrow.bias = nn.Parameter(head.bias[only].clone(), requires_grad=False)
    module.set_output_embeddings(narrow)


def load_module(
    source: dict[str, object], dtype: torch.dtype, device: str, shard: Mapping[str, object] | None = None
) -> Any:
    """Loads a model with slot attention. `source` and `shard` are from_pretrained's arguments."""
    from transformers import AutoModelForCausalLM

    from tandem.runners.torch.module_checks import refuse_weights

    register_attention()
    module, info = AutoModelForCausalLM.from_pretrained(
        **source,
        **(shard or {}),
        dtype=dtype,
        attn_implementation=ATTENTION,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
        trust_remote_code=False,
    )
    refuse_weights(info["missing_keys"], info["unexpected_keys"], [name for name, *_ in info["mismatched_keys"]])
    return module.to(device).requires_grad_(False)


def module_from(folder: Path, weights: ScaledWeights, dtype: torch.dtype) -> Any:
    """A module on the CPU with slot attention and these weights. Raises ValueError for missing or unused ones."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from tandem.runners.torch.module_checks import refuse_weights

    register_attention()
    config = AutoConfig.from_pretrained(folder)
    config.__dict__.pop("quantization_config", None)
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


def fix_rotary(module: Any, length: int) -> None:
    """Fixes longrope and dynamic frequencies at those of `length`; else tokens would depend on other rows."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str):
            part.rope_type = _fixed(part, kinds, length)
        elif isinstance(kinds, dict):
            part.rope_type = {layer: _fixed(part, kind, length, layer) for layer, kind in kinds.items()}


def _fixed(part: Any, kind: str, length: int, layer: str | None = None) -> str:
    # returns a kind that transformers does not update
    if kind != "longrope" and "dynamic" not in kind:
        return kind
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    buffer = getattr(part, f"{layer}_inv_freq" if layer else "inv_freq")
    buffer.copy_(ROPE_INIT_FUNCTIONS[kind](part.config, buffer.device, seq_len=length, layer_type=layer)[0])
    rope = part.config.rope_parameters[layer] if layer else part.config.rope_parameters
    original = rope.get("original_max_position_embeddings") or part.config.max_position_embeddings
    place = f"{'beyond' if length > original else 'within'} the original {original}"
    log.info("rotary embedding: %s has the frequencies of sequence_length %d, %s, for all prompts", kind, length, place)
    return "fixed"

"""CPU kernels whose result for a row depends neither on its index nor on the number of rows.

Stock kernels choose the order of summation by shape. `PackedLinear` is oneDNN's inner product over prepacked weights,
whose order is the same from 2 rows on, so a single row is computed as two. `slot_attention` makes the query heads of a
KV head rows of one product, padded to a multiple of 8, since its GEMM treats remainders of 1 to 3 rows differently.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.runners.families import UnsupportedModel

ATTENTION = "tandem_slots"
ROW_MULTIPLE = 8
_HARMLESS = frozenset(
    {"is_causal", "position_ids", "output_attentions", "output_hidden_states", "output_router_logits", "use_cache"}
)  # arguments of attention that the mask covers, or that shape no result


class PackedLinear(nn.Module):
    """nn.Linear with weights in oneDNN's layout: [..., in_features] to [..., out_features], one dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        single = x.numel() == self.in_features
        rows = x.reshape(-1, self.in_features)
        if single:
            rows = torch.cat((rows, rows))
        out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return (out[:1] if single else out).view(*x.shape[:-1], self.out_features)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs inner products of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def pack_linears(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def attention_rows(width: int, groups: int) -> int:
    """Query rows of a KV head in a step, with padding; the mask has as many."""
    return -(-width * groups // ROW_MULTIPLE) * ROW_MULTIPLE


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention over slot caches, with transformers' signature.

    query [rows, heads, width, d], key and value [rows, kv_heads, length, d], additive causal mask [rows, 1,
    attention_rows, length], sinks s_aux [heads]. Returns [rows, width, heads, d]. Raises UnsupportedModel for other
    arguments.
    """
    for name, given in {"dropout": dropout or None, **kwargs}.items():
        if given is not None and name not in _HARMLESS:
            raise UnsupportedModel(f"attention of {type(module).__name__} takes {name}, which slots do not serve")
    rows, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    used, padding = heads // kv_heads * width, attention_mask.shape[2] - heads // kv_heads * width
    grouped = F.pad(query.reshape(rows, kv_heads, used, dim), (0, 0, 0, padding))
    if sliding_window is not None and sliding_window < attention_mask.shape[3]:
        attention_mask = _windowed(attention_mask, sliding_window)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        scores = grouped @ key.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores = scores + attention_mask
        if s_aux is not None:
            sinks = F.pad(s_aux.repeat_interleave(width).view(kv_heads, used), (0, padding))
            scores = torch.cat((scores, sinks[None, ..., None].expand(rows, -1, -1, 1)), dim=3)
        weights = scores.float().softmax(3)[..., : key.shape[2]]
        out = weights.to(value.dtype) @ value
    return out[:, :, :used].reshape(rows, heads, width, dim).transpose(1, 2).contiguous(), None


def _windowed(mask: Tensor, window: int) -> Tensor:
    # a position is hidden if its follower by `window` positions is visible
    follower = F.pad(mask[..., window:], (0, window), value=-1.0)
    return torch.where(follower == 0, torch.finfo(mask.dtype).min, mask)


def register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, slot_attention)

"""Provides CPU kernels whose result for a row depends neither on its index nor on the number of rows.

Stock kernels sum in an order that depends on the shape: with MKL in float32 and two threads, row 4 of a 6-row product
differs in its last bits from row 0 of the same product. Two kernels avoid that on the CPU, and are faster too:

* `PackedLinear`: oneDNN's inner product over prepacked weights. It sums rows in the same order at every row count of 2
  or more, so a single row is computed as two.
* `slot_attention`: query heads that share a KV head become rows of one product (no copy of the cache per head), and
  their number is padded to a multiple of 8, because the GEMM below treats remainders of 1 to 3 rows differently.

`tandem/runners/batch_invariance.py` checks the result on the device at every start.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "tandem_slots"
ROW_MULTIPLE = 8


class PackedLinear(nn.Module):
    """Replaces nn.Linear, with weights in oneDNN's layout: [..., in_features] to [..., out_features], one dtype."""

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
    """Whether oneDNN has packed inner products for this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def pack_linears(module: nn.Module) -> None:
    """Replaces every nn.Linear below `module` by its packed form."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def attention_rows(width: int, groups: int) -> int:
    """Query rows of one KV head in a step, including padding; the mask has as many."""
    return -(-width * groups // ROW_MULTIPLE) * ROW_MULTIPLE


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention over slot caches, with the signature that transformers expects.

    query [rows, heads, width, d], key and value [rows, kv_heads, length, d], additive mask
    [rows, 1, attention_rows, length]. Returns [rows, width, heads, d].
    """
    rows, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    used = heads // kv_heads * width
    grouped = F.pad(query.reshape(rows, kv_heads, used, dim), (0, 0, 0, attention_mask.shape[2] - used))
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out[:, :, :used].reshape(rows, heads, width, dim).transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Registers `slot_attention` with transformers under the name ATTENTION."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, slot_attention)

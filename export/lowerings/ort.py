"""Custom ops as ONNX Runtime's fused operators (domain com.microsoft)."""

from __future__ import annotations

import torch
from torch import Tensor

import onnxlm.models.layers.cached_attention  # noqa: F401  registers the op
from onnxlm.errors import ExportError
from onnxlm.export.lowerings import Lowering
from onnxlm.export.lowerings._rotary import rotate


def _cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    sliding_window: int,
    softcap: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """GroupQueryAttention over a cache where each row's columns lie left-aligned.

    The operator counts columns, so only sums of the mask matter: tokens of one call must be right-padded.
    `query_seqlens` (input 16) makes any chunk behind any pasts one case; without it the operator takes
    total == S for a first prompt and forgets the past.
    """
    width = past_key.shape[3]
    _check_width(width)
    if cos is not None and sin is not None and (width % 16 or cos.shape[1] % 8):
        # Widths that the operator attends over but does not rotate.
        query = rotate(query, position_ids, cos, sin, num_heads, interleaved)
        key = rotate(key, position_ids, cos, sin, num_kv_heads, interleaved)
        cos = sin = None
    new_tokens = query.shape[1]
    lengths = attention_mask.sum(1)
    seqlens_k = (lengths - 1).to(torch.int32)
    total = torch.scalar_tensor(attention_mask.shape[1], dtype=torch.int32)
    query_lengths = attention_mask[:, -new_tokens:].sum(1).to(torch.int32)
    inputs = [query, key, value, past_key, past_value, seqlens_k, total, cos, sin]
    batch, heads, columns = past_key.shape[:3]
    present = (batch, heads, columns + new_tokens, width)
    outputs = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [*inputs, *[None] * 7, query_lengths],
        {
            "num_heads": num_heads,
            "kv_num_heads": num_kv_heads,
            "scale": scale,
            "local_window_size": sliding_window if sliding_window else -1,
            "softcap": softcap,
            "do_rotary": int(cos is not None),
            "rotary_interleaved": int(interleaved),
        },
        dtypes=[query.dtype] * 3,
        shapes=[query.shape, present, present],
        version=1,
    )
    return outputs[0], outputs[1], outputs[2]


def _check_width(head_dim: int) -> None:
    if head_dim % 8:
        raise ExportError(
            "head_dim does not fit GroupQueryAttention",
            found=head_dim,
            allowed="multiples of 8",
            fix="use --lowering portable",
        )


LOWERING = Lowering(
    opset=23,
    state_update="in_place",
    decompositions={torch.ops.onnxlm.cached_attention.default: _cached_attention},
    passes=("torch_layout", "silu", "packed_qkv", "merged_gate_up", "skip_norm"),
)

"""Custom ops as standard ONNX operators only (opset 23): any conforming runtime runs them."""

from __future__ import annotations

import torch
from torch import Tensor

from onnxlm.export.lowerings import Lowering
from onnxlm.export.lowerings._rotary import rotate
from onnxlm.models.layers.cached_attention import visible_columns


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
    """RotaryEmbedding, Concat, Attention; the mask says everything, so padding may lie anywhere.

    Past and new columns are joined outside of Attention: its own past would make it anchor `is_causal`,
    and here the mask is causal already.
    """
    if cos is not None and sin is not None:
        query = rotate(query, position_ids, cos, sin, num_heads, interleaved)
        key = rotate(key, position_ids, cos, sin, num_kv_heads, interleaved)
    batch, new_tokens = query.shape[:2]

    def heads_first(x: Tensor, heads: int) -> Tensor:
        return x.reshape(batch, new_tokens, heads, -1).transpose(1, 2)

    present_key = torch.cat((past_key, heads_first(key, num_kv_heads)), dim=2)
    present_value = torch.cat((past_value, heads_first(value, num_kv_heads)), dim=2)
    visible = visible_columns(attention_mask, new_tokens, sliding_window)[:, None]
    mixed = torch.onnx.ops.symbolic(
        "Attention",
        [heads_first(query, num_heads), present_key, present_value, visible],
        {"scale": scale, "softcap": softcap},
        dtype=query.dtype,
        shape=(batch, num_heads, new_tokens, query.shape[2] // num_heads),
        version=23,
    )
    return mixed.transpose(1, 2).reshape(query.shape), present_key, present_value


LOWERING = Lowering(
    opset=23,
    state_update="append",
    decompositions={torch.ops.onnxlm.cached_attention.default: _cached_attention},
    passes=("matmul_layout",),
)

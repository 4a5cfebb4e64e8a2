"""The standard operator for rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(
    x: Tensor, position_ids: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
) -> Tensor:
    """Rotary embedding of [B, S, heads * D]; a table narrower than D / 2 turns the first widths only."""
    rotary_dim = 2 * cos.shape[1]
    whole = rotary_dim == x.shape[2] // heads
    turned: Tensor = torch.onnx.ops.symbolic(
        "RotaryEmbedding",
        [x, cos, sin, position_ids],
        {
            "num_heads": heads,
            "interleaved": int(interleaved),
            "rotary_embedding_dim": 0 if whole else rotary_dim,
        },
        dtype=x.dtype,
        shape=x.shape,
        version=23,
    )
    return turned


def turn(
    x: Tensor, position_ids: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
) -> Tensor:
    """The custom op `onnxlm::rotary`."""
    return rotate(x, position_ids, cos, sin, heads, interleaved)

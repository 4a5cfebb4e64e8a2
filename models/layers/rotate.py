"""Rotary positions as a torch custom op of its own, for layers whose attention does not rotate itself."""

from __future__ import annotations

import torch
from torch import Tensor

from onnxlm.models.layers.cached_attention import rotate, split_heads

Tables = tuple[Tensor, Tensor]


@torch.library.custom_op("onnxlm::rotary", mutates_args=())
def rotary_op(
    x: Tensor, position_ids: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
) -> Tensor:
    """Opaque node of a traced program; `export/lowerings` replaces it. See `rotary`."""
    return _reference(x, position_ids, (cos, sin), heads, interleaved)


@rotary_op.register_fake
def _shape_only(
    x: Tensor, position_ids: Tensor, cos: Tensor, sin: Tensor, heads: int, interleaved: bool
) -> Tensor:
    return torch.empty_like(x)


def _reference(
    x: Tensor, position_ids: Tensor, tables: Tables, heads: int, interleaved: bool
) -> Tensor:
    split = split_heads(x, heads).transpose(1, 2)
    turned = rotate(split, tables[0][position_ids], tables[1][position_ids], interleaved)
    return turned.transpose(1, 2).flatten(-2)


def rotary(
    x: Tensor, position_ids: Tensor, tables: Tables, heads: int, interleaved: bool = False
) -> Tensor:
    """Turn the first R widths of every head by its token's position.

    Args:
        x: [B, S, heads * D].
        position_ids: int64 [B, S], rows of the tables.
        tables: Cosines and sines, each [M, R/2].
        heads: Heads of x.
        interleaved: Pair (2i, 2i + 1) instead of (i, i + R/2).

    Returns:
        Like x.
    """
    if not torch.compiler.is_exporting():
        return _reference(x, position_ids, tables, heads, interleaved)
    turned: Tensor = rotary_op(x, position_ids, *tables, heads, interleaved)
    return turned

"""Attention over one compressed vector a token, which serves every head as key and as value.

Legend of shapes: B rows, S new tokens a row, P cached columns, T = P + S, H heads, C width of the latent
vector, R width of the rotary key that all heads share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onnxlm.models.layers.cached_attention import (
    AttentionSpec,
    attend,
    split_heads,
    visible_columns,
)


@torch.library.custom_op("onnxlm::latent_attention", mutates_args=())
def latent_attention_op(
    query: Tensor,
    latent: Tensor,
    past: Tensor,
    attention_mask: Tensor,
    num_heads: int,
    value_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Opaque node of a traced program; `export/lowerings` replaces it. See `latent_attention`."""
    mixed, present = _reference(query, latent, past, attention_mask, num_heads, value_width, scale)
    return mixed.contiguous(), present.contiguous()


@latent_attention_op.register_fake
def _shapes_only(
    query: Tensor,
    latent: Tensor,
    past: Tensor,
    attention_mask: Tensor,
    num_heads: int,
    value_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    rows, new = query.shape[:2]
    present = past.new_empty((rows, 1, past.shape[2] + new, past.shape[3]))
    return query.new_empty((rows, new, num_heads * value_width)), present


def _reference(
    query: Tensor,
    latent: Tensor,
    past: Tensor,
    attention_mask: Tensor,
    num_heads: int,
    value_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    heads = split_heads(query, num_heads).transpose(1, 2)
    present = torch.cat((past, latent.unsqueeze(1)), dim=2)
    visible = visible_columns(attention_mask, query.shape[1], sliding_window=0)
    spec = AttentionSpec(num_heads, num_kv_heads=1, scale=scale)
    return attend(heads, present, present[..., :value_width], visible, spec), present


def latent_attention(
    query: Tensor,
    latent: Tensor,
    past: Tensor,
    attention_mask: Tensor,
    num_heads: int,
    value_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Append to the cache, attend causally over real columns; keys are whole, values their first widths.

    Args:
        query: [B, S, H * (C + R)], rotated and absorbed into the latent space.
        latent: [B, S, C + R], the new tokens' latent vectors and rotated shared keys.
        past: [B, 1, P, C + R].
        attention_mask: int64 [B, P + S], 1 for a real token.
        num_heads: H.
        value_width: C.
        scale: Factor of the scores.

    Returns:
        [B, S, H * C], and the grown cache [B, 1, P + S, C + R].
    """
    arguments = (query, latent, past, attention_mask, num_heads, value_width, scale)
    if not torch.compiler.is_exporting():
        return _reference(*arguments)
    output: tuple[Tensor, Tensor] = latent_attention_op(*arguments)
    return output

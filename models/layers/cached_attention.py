"""Attention over a key-value cache: one torch custom op, so that tracing keeps it as one node.

Legend of shapes (the project's): B rows, S new tokens a row, P cached columns, T = P + S, H query heads,
Hkv key-value heads, D head width, R rotary width (<= D), M positions in the rotary table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What of an attention layer is not a tensor.

    Attributes:
        num_heads: Query heads, H.
        num_kv_heads: Key-value heads, Hkv; divides H.
        scale: Factor of the scores, usually D ** -0.5.
        sliding_window: Positions a query sees, itself included; 0 means all.
        softcap: Scores become softcap * tanh(scores / softcap) before masking; 0 means off.
        interleaved: Rotary pairs are (2i, 2i + 1) instead of (i, i + R/2).
    """

    num_heads: int
    num_kv_heads: int
    scale: float
    sliding_window: int = 0
    softcap: float = 0.0
    interleaved: bool = False


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., heads * D] -> [..., heads, D]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Apply rotary position embedding to the first R widths of each head.

    Source: Su et al., "RoFormer" (2021), eq. 34, in the half-split or the interleaved pairing.

    Args:
        x: [B, heads, S, D].
        cos: [B, S, R/2], cosine of each row's position times frequency.
        sin: [B, S, R/2].
        interleaved: Pair (2i, 2i + 1) instead of (i, i + R/2).

    Returns:
        [B, heads, S, D].
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def columns_held(attention_mask: Tensor, columns: int) -> Tensor:
    """The mask [B, <= T] of a cache that may have lost its first columns: they are before the window."""
    return attention_mask[:, attention_mask.shape[1] - columns :]


def visible_columns(attention_mask: Tensor, new_tokens: int, sliding_window: int) -> Tensor:
    """Which cache columns each new token may read.

    A column is visible when it is real, not later than the token's own, and (with a window) less than
    `sliding_window` real tokens before it.

    Args:
        attention_mask: [B, T], 1 for a real token.
        new_tokens: S; the new tokens are the last S columns.
        sliding_window: 0 means no limit.

    Returns:
        bool [B, S, T].
    """
    total = attention_mask.shape[1]
    columns = torch.arange(total, device=attention_mask.device)
    own = columns[total - new_tokens :]
    visible = attention_mask.bool()[:, None, :] & (columns[None, :] <= own[:, None])[None]
    if sliding_window:
        positions = attention_mask.cumsum(1)
        distance = positions[:, total - new_tokens :, None] - positions[:, None, :]
        visible = visible & (distance < sliding_window)
    return visible


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    spec: AttentionSpec,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention with grouped heads, soft-cap before bias and mask, softmax in fp32.

    Args:
        query: [B, H, S, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, Dv].
        visible: bool [B, S, T].
        spec: Heads, scale and soft-cap.
        bias: Added to the scores, [B, H, S, T].
        sinks: [H], a further score of every query whose share of the softmax is thrown away.

    Returns:
        [B, S, H * Dv].
    """
    batch, heads, new_tokens, width = query.shape
    groups = heads // spec.num_kv_heads
    grouped = query.reshape(batch, spec.num_kv_heads, groups * new_tokens, width)
    scores = (grouped @ key.transpose(-1, -2)) * spec.scale
    scores = scores.reshape(batch, spec.num_kv_heads, groups, new_tokens, -1)
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if bias is not None:
        scores = scores + bias.reshape(scores.shape)
    # finfo.min, not -inf: a padding query that sees nothing must give a number, not NaN.
    scores = scores.masked_fill(~visible[:, None, None], torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.reshape(1, spec.num_kv_heads, groups, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    mixed = weights.reshape(batch, spec.num_kv_heads, groups * new_tokens, -1) @ value
    mixed = mixed.reshape(batch, heads, new_tokens, value.shape[-1])
    return mixed.transpose(1, 2).reshape(batch, new_tokens, -1)


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, new_tokens = query.shape[:2]
    query = query.reshape(batch, new_tokens, spec.num_heads, -1).transpose(1, 2)
    key = key.reshape(batch, new_tokens, spec.num_kv_heads, -1).transpose(1, 2)
    value = value.reshape(batch, new_tokens, spec.num_kv_heads, -1).transpose(1, 2)
    if tables is not None:
        cos, sin = tables[0][position_ids], tables[1][position_ids]
        query = rotate(query, cos, sin, spec.interleaved)
        key = rotate(key, cos, sin, spec.interleaved)
    key = torch.cat((cache[0], key), dim=2)
    value = torch.cat((cache[1], value), dim=2)
    mask = columns_held(attention_mask, key.shape[2]) if spec.sliding_window else attention_mask
    visible = visible_columns(mask, new_tokens, spec.sliding_window)
    return attend(query, key, value, visible, spec, bias, sinks), key, value


@torch.library.custom_op("onnxlm::cached_attention", mutates_args=())
def cached_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    sliding_window: int,
    softcap: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Opaque node of a traced program; `export/lowerings` replaces it. See `cached_attention`."""
    spec = AttentionSpec(num_heads, num_kv_heads, scale, sliding_window, softcap, interleaved)
    tables = None if cos is None or sin is None else (cos, sin)
    cache = (past_key, past_value)
    output, present_key, present_value = _reference(
        query, key, value, cache, attention_mask, position_ids, tables, bias, sinks, spec
    )
    return output.contiguous(), present_key.contiguous(), present_value.contiguous()


@cached_attention_op.register_fake
def _shapes_only(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor]:
    def grown(past: Tensor) -> Tensor:
        batch, heads, columns, width = past.shape
        return past.new_empty((batch, heads, columns + query.shape[1], width))

    return torch.empty_like(query), grown(past_key), grown(past_value)


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    spec: AttentionSpec,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate query and key, append key and value to the cache, attend causally over real columns.

    Eager calls run plain differentiable PyTorch; `torch.export` records one opaque node.

    Args:
        query: [B, S, H * D].
        key: [B, S, Hkv * D], not yet rotated.
        value: [B, S, Hkv * D].
        cache: Past keys (rotated) and values, each [B, Hkv, P, D]; with a window they may lack the first of
            the P columns.
        attention_mask: int64 [B, P + S], 1 for a real token, 0 for padding.
        position_ids: int64 [B, S], position of each new token within its row.
        tables: Rotary cosines and sines, each [M, R/2]; None for a model without rotary positions.
        spec: Heads, scale, window, soft-cap, pairing.
        bias: Added to the scores, [B, H, S, T], see `distance_bias`.
        sinks: A score [H] that takes part in the softmax and stands for no token.

    Returns:
        Attention output [B, S, H * D], present keys and present values [B, Hkv, P + S, D].
    """
    if not torch.compiler.is_exporting():
        return _reference(
            query, key, value, cache, attention_mask, position_ids, tables, bias, sinks, spec
        )
    cos, sin = tables if tables is not None else (None, None)
    output: tuple[Tensor, Tensor, Tensor] = cached_attention_op(
        query,
        key,
        value,
        *cache,
        attention_mask,
        position_ids,
        cos,
        sin,
        bias,
        sinks,
        spec.num_heads,
        spec.num_kv_heads,
        spec.scale,
        spec.sliding_window,
        spec.softcap,
        spec.interleaved,
    )
    return output

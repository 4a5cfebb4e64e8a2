"""Custom ops as standard ONNX operators only (opset 23): any conforming runtime runs them."""

from __future__ import annotations

import torch
from torch import Tensor

import onnxlm.models.layers.latent_attention  # noqa: F401  registers the op
from onnxlm.export.lowerings import Lowering
from onnxlm.export.lowerings._rotary import rotate, turn
from onnxlm.models.layers.cached_attention import columns_held, visible_columns
from onnxlm.models.layers.distance_bias import by_distance
from onnxlm.models.layers.experts import GateSpec, gated


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
    bias: Tensor | None,
    sinks: Tensor | None,
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
    mask = columns_held(attention_mask, present_key.shape[2]) if sliding_window else attention_mask
    visible = visible_columns(mask, new_tokens, sliding_window)
    cached = (present_key, present_value)
    if sinks is not None:
        # A column of zeros behind the caches: its key has score 0, which the mask makes the sink's.
        cached = (_with_zeros(present_key), _with_zeros(present_value))
    mask = _mask(visible, bias, sinks)
    mixed = _attention(heads_first(query, num_heads), cached, mask, scale, softcap)
    return mixed, present_key, present_value


def _with_zeros(cached: Tensor) -> Tensor:
    return torch.cat((cached, torch.zeros_like(cached[:, :, :1])), dim=2)


def _attention(
    query: Tensor, cached: tuple[Tensor, Tensor], mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention of [B, H, S, D] over keys and values: [B, S, H * Dv]."""
    key, value = cached
    batch, heads, new_tokens = query.shape[:3]
    mixed = torch.onnx.ops.symbolic(
        "Attention",
        [query, key, value, mask],
        {"scale": scale, "softcap": softcap},
        dtype=query.dtype,
        shape=(batch, heads, new_tokens, value.shape[3]),
        version=23,
    )
    return mixed.transpose(1, 2).flatten(-2)


def _mask(visible: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
    """[B, 1 or H, S, T]: bool where only visibility matters; with a column more that holds the sinks."""
    if bias is None and sinks is None:
        return visible[:, None]
    given = bias if bias is not None else sinks
    assert given is not None
    hidden = torch.finfo(given.dtype).min
    mask = torch.where(visible[:, None], given.new_zeros(()) if bias is None else bias, hidden)
    if sinks is None:
        return mask
    batch, _, new_tokens = mask.shape[:3]
    heads = sinks.shape[0]
    column = sinks.to(mask.dtype).reshape(1, heads, 1, 1).expand(batch, heads, new_tokens, 1)
    return torch.cat((mask.expand(batch, heads, new_tokens, mask.shape[3]), column), dim=3)


def _latent_attention(
    query: Tensor,
    latent: Tensor,
    past: Tensor,
    attention_mask: Tensor,
    num_heads: int,
    value_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention with one key-value head; values are the keys' first widths."""
    present = torch.cat((past, latent.unsqueeze(1)), dim=2)
    visible = visible_columns(attention_mask, query.shape[1], sliding_window=0)
    heads = query.reshape(*query.shape[:2], num_heads, -1).transpose(1, 2)
    cached = (present, present[..., :value_width])
    return _attention(heads, cached, visible[:, None], scale, softcap=0.0), present


def _distance_bias(table: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """Columns hold padding anywhere: a column's position is the number of real tokens before it."""
    return by_distance(table, position_ids, attention_mask.cumsum(1) - 1)


def _experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    logits: Tensor | None,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    normalized: bool,
    alpha: float,
    shift: float,
    limit: float,
) -> Tensor:
    """Every expert runs every token; those not chosen have a share of 0.

    Standard operators have no other form that is one graph for any routing.
    """
    tokens = x.flatten(0, 1)
    inner = tokens[None] @ gate_up.transpose(1, 2)  # [E, tokens, 2 N]
    if gate_up_bias is not None:
        inner = inner + gate_up_bias[:, None]
    outer = gated(inner, GateSpec(alpha, shift, limit)) @ down.transpose(1, 2)
    if down_bias is not None:
        outer = outer + down_bias[:, None]
    shares = weights.flatten(0, 1).to(x.dtype)
    every = shares.new_zeros((shares.shape[0], gate_up.shape[0]))
    every = every.scatter(1, indices.flatten(0, 1), shares)
    return (outer * every.T[:, :, None]).sum(0).reshape(x.shape)


LOWERING = Lowering(
    opset=23,
    state_update="append",
    decompositions={
        torch.ops.onnxlm.cached_attention.default: _cached_attention,
        torch.ops.onnxlm.latent_attention.default: _latent_attention,
        torch.ops.onnxlm.distance_bias.default: _distance_bias,
        torch.ops.onnxlm.rotary.default: turn,
        torch.ops.onnxlm.experts.default: _experts,
    },
    passes=("matmul_layout",),
)

"""Custom ops as ONNX Runtime's fused operators (domain com.microsoft)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import onnxlm.models.layers.experts
import onnxlm.models.layers.latent_attention
import onnxlm.models.layers.rotate  # noqa: F401  these register the ops
from onnxlm.errors import ExportError
from onnxlm.export.lowerings import Lowering
from onnxlm.export.lowerings._rotary import rotate, turn
from onnxlm.models.layers.distance_bias import by_distance


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
    lengths, total, query_lengths = _counts(attention_mask, new_tokens)
    inputs = [query, key, value, past_key, past_value, lengths, total, cos, sin]
    # A cache that has lost its first columns (`window_cache`) no longer tells positions.
    rotated_at = position_ids if sliding_window and cos is not None else None
    batch, heads, columns = past_key.shape[:3]
    present = (batch, heads, columns + new_tokens, width)
    outputs = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [*inputs, rotated_at, bias, sinks, *[None] * 4, query_lengths],
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


def _counts(attention_mask: Tensor, new_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32: tokens of each row less one [B], columns, and new tokens of each row [B]."""
    return (
        (attention_mask.sum(1) - 1).to(torch.int32),
        torch.scalar_tensor(attention_mask.shape[1], dtype=torch.int32),
        attention_mask[:, -new_tokens:].sum(1).to(torch.int32),
    )


def _latent_attention(
    query: Tensor,
    latent: Tensor,
    past: Tensor,
    attention_mask: Tensor,
    num_heads: int,
    value_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """GroupQueryAttention with one key-value head, which reads keys and values from the same cache.

    It takes values as wide as keys; what is behind `value_width` is cut off its outcome.
    """
    mixed, present, _ = _cached_attention(
        query,
        latent,
        latent,
        past,
        past,
        attention_mask,
        attention_mask[:, :0],
        cos=None,
        sin=None,
        bias=None,
        sinks=None,
        num_heads=num_heads,
        num_kv_heads=1,
        scale=scale,
        sliding_window=0,
        softcap=0.0,
        interleaved=False,
    )
    heads = mixed.reshape(*mixed.shape[:2], num_heads, -1)
    return heads[..., :value_width].flatten(-2), present


def _distance_bias(table: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """A row's tokens lie left-aligned in the cache: a column's number is its token's position."""
    columns = torch.arange(attention_mask.shape[1], device=table.device)
    return by_distance(table, position_ids, columns[None])


# Logit of an expert that is not chosen: softmax makes it 0.
_NOT_CHOSEN = -1e4
# Below any routing weight that matters, and still with a logarithm.
_LEAST_WEIGHT = 1e-30


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
    """MoE, which routes by the softmax of the logits that it is given; one token runs only its own experts.

    With `normalize_routing_weights` the softmax goes over the k chosen, without over all: both of the ways in
    which routing may come with logits. Where it has none, logarithms of weights give weights / their sum.
    """
    attributes: dict[str, Any] = {
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "k": indices.shape[-1],
        "normalize_routing_weights": int(logits is None or normalized),
        "activation_alpha": alpha,
        "activation_beta": shift,
    }
    if limit:
        attributes["swiglu_limit"] = limit
    routed = logits if logits is not None else _as_logits(indices, weights.to(x.dtype), gate_up)
    mixed: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MoE",
        [x, routed.flatten(0, 1), gate_up, gate_up_bias, down, down_bias],
        attributes,
        dtype=x.dtype,
        shape=x.shape,
        version=1,
    )
    if logits is not None or normalized:
        return mixed
    return mixed * weights.sum(-1, keepdim=True).to(x.dtype)


def _as_logits(indices: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """[B, S, E]: logarithms of the weights where they are, and far below elsewhere."""
    logits = weights.new_full((*weights.shape[:-1], matrices.shape[0]), _NOT_CHOSEN)
    return logits.scatter(-1, indices, weights.clamp(min=_LEAST_WEIGHT).log())


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
    decompositions={
        torch.ops.onnxlm.cached_attention.default: _cached_attention,
        torch.ops.onnxlm.latent_attention.default: _latent_attention,
        torch.ops.onnxlm.distance_bias.default: _distance_bias,
        torch.ops.onnxlm.rotary.default: turn,
        torch.ops.onnxlm.experts.default: _experts,
    },
    passes=(
        "torch_layout",
        "silu",
        "packed_qkv",
        "merged_gate_up",
        "skip_norm",
        "latent_cache",
        "window_cache",
        "rotary_scale",
    ),
)

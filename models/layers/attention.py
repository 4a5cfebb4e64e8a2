"""Attention blocks: projections around the cached attention ops.

Legend of shapes: see `cached_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from onnxlm.models.layers.cached_attention import AttentionSpec, cached_attention, split_heads
from onnxlm.models.layers.rotate import Tables, rotary

# What a layer keeps of past tokens: one tensor for each of its `state_shapes`, in that order.
Cache = tuple[Tensor, ...]


@dataclass(frozen=True)
class AttentionContext:
    """What every layer of one forward pass shares.

    Attributes:
        attention_mask: int64 [B, P + S].
        position_ids: int64 [B, S].
        tables: Rotary cosines and sines [M, R/2] by the name that layers ask for.
        bias: Added to every layer's scores [B, H, S, P + S], or None.
        by_position: `position_ids` are rows of the tables that need not be those of the columns.
    """

    attention_mask: Tensor
    position_ids: Tensor
    tables: Mapping[str, Tables] = field(default_factory=dict)
    bias: Tensor | None = None
    by_position: bool = False


@dataclass(frozen=True)
class AttentionOptions:
    """What attention blocks of different families differ in, beside their spec.

    Attributes:
        qkv_bias: The projections to queries, keys and values have biases.
        out_bias: The output projection has one.
        rope: Name of the rotary tables; None for a layer without.
        sinks: Each head has a learned score that stands for no token (Xiao et al., 2023, as gpt-oss has it).
        norm_all_heads: Norms of queries and keys go over all heads together, [B, S, heads * D], instead of
            over each head, [B, S, heads, D].
        rotate_by_position: Turn by `position_ids`, whose rows need not be those of the columns.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    rope: str | None = "default"
    sinks: bool = False
    norm_all_heads: bool = False
    rotate_by_position: bool = False


class Attention(nn.Module):
    """Multi-head attention whose query heads share key-value heads in groups.

    Source: Ainslie et al., "GQA" (2023). Hkv = H is multi-head, Hkv = 1 multi-query attention.

    Args:
        hidden_size: Width of the residual stream.
        head_dim: D.
        spec: Heads, scale, window, soft-cap, pairing.
        options: See `AttentionOptions`.
        norms: Norms of queries and keys before their rotation, or None.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        spec: AttentionSpec,
        options: AttentionOptions = AttentionOptions(),
        norms: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.options = options
        self.head_dim = head_dim
        queries, keys = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, queries, bias=options.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, keys, bias=options.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, keys, bias=options.qkv_bias)
        self.o_proj = nn.Linear(queries, hidden_size, bias=options.out_bias)
        self.q_norm = None if norms is None else norms[0]
        self.k_norm = None if norms is None else norms[1]
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads)) if options.sinks else None

    @property
    def state_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, width) of each tensor that is kept a token."""
        shape = (self.spec.num_kv_heads, self.head_dim)
        return {"key": shape, "value": shape}

    @property
    def window(self) -> int:
        """Tokens that a query sees, its own included; 0 means all."""
        return self.spec.sliding_window

    def forward(self, x: Tensor, cache: Cache, context: AttentionContext) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size], cache 2 x [B, Hkv, P, D] -> output like x, cache 2 x [B, Hkv, P + S, D]."""
        query = self._normed(self.q_proj(x), self.q_norm)
        key = self._normed(self.k_proj(x), self.k_norm)
        tables = None if self.options.rope is None else context.tables[self.options.rope]
        if tables is not None and (self.options.rotate_by_position or context.by_position):
            pairing = self.spec.interleaved
            query = rotary(query, context.position_ids, tables, self.spec.num_heads, pairing)
            key = rotary(key, context.position_ids, tables, self.spec.num_kv_heads, pairing)
            tables = None
        mixed, present_key, present_value = cached_attention(
            query,
            key,
            self.v_proj(x),
            (cache[0], cache[1]),
            context.attention_mask,
            context.position_ids,
            tables,
            self.spec,
            context.bias,
            self.sinks,
        )
        return self.o_proj(mixed), (present_key, present_value)

    def _normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is None:
            return x
        if self.options.norm_all_heads:
            normed: Tensor = norm(x)
            return normed
        heads: Tensor = norm(split_heads(x, x.shape[-1] // self.head_dim))
        return heads.flatten(-2)

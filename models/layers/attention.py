"""Attention blocks: projections around the cached attention op."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from onnxlm.models.layers.cached_attention import AttentionSpec, cached_attention

Cache = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AttentionContext:
    """What every layer of one forward pass shares.

    Attributes:
        attention_mask: int64 [B, P + S].
        position_ids: int64 [B, S].
        tables: Rotary cosines and sines [M, R/2], or None.
    """

    attention_mask: Tensor
    position_ids: Tensor
    tables: tuple[Tensor, Tensor] | None


class GroupedQueryAttention(nn.Module):
    """Multi-head attention whose query heads share key-value heads in groups.

    Source: Ainslie et al., "GQA" (2023). Hkv = H is multi-head, Hkv = 1 multi-query attention.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, spec: AttentionSpec, bias: bool = False
    ) -> None:
        super().__init__()
        self.spec = spec
        self.q_proj = nn.Linear(hidden_size, spec.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, spec.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, spec.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(spec.num_heads * head_dim, hidden_size, bias=bias)

    def forward(self, x: Tensor, cache: Cache, context: AttentionContext) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size], cache 2 x [B, Hkv, P, D] -> output like x, cache 2 x [B, Hkv, P + S, D]."""
        mixed, key, value = cached_attention(
            self.q_proj(x),
            self.k_proj(x),
            self.v_proj(x),
            cache,
            context.attention_mask,
            context.position_ids,
            context.tables,
            self.spec,
        )
        return self.o_proj(mixed), (key, value)

"""Multi-head latent attention: the cache holds one compressed vector a token instead of keys and values.

Legend of shapes: B rows, S new tokens a row, P cached columns, H heads, C latent width (`kv_lora_rank`), R
rotary width (`qk_rope_head_dim`), N the rest of a query head (`qk_nope_head_dim`), V width of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onnxlm.models.layers.attention import AttentionContext, Cache
from onnxlm.models.layers.cached_attention import split_heads
from onnxlm.models.layers.latent_attention import latent_attention
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotate import rotary


@dataclass(frozen=True)
class LatentSpec:
    """Sizes of a latent attention block, by Hugging Face key name.

    Attributes:
        num_heads: H.
        q_lora_rank: Width through which queries are made; None for one plain projection.
        kv_lora_rank: C.
        qk_nope_head_dim: N.
        qk_rope_head_dim: R.
        v_head_dim: V.
        scale: Factor of the scores.
        eps: Of the norms of the compressed vectors.
        interleaved: Rotary pairs are (2i, 2i + 1) instead of (i, i + R/2).
        bias: The projections into the compressed widths and the output projection have biases.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    eps: float
    interleaved: bool = True
    bias: bool = False


class LatentAttention(nn.Module):
    """Keys and values of every head are linear in one latent vector, so the heads' maps move to the queries.

    score = (q_n W_k) . c + q_r . k_r and output = (softmax(score) c) W_v: a cached token costs C + R numbers,
    whatever H is, and nothing is expanded.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), sections 2.1.2 (the absorption) and 2.1.3.
    """

    def __init__(self, hidden_size: int, spec: LatentSpec) -> None:
        super().__init__()
        self.spec = spec
        queries = spec.num_heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        if spec.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, spec.q_lora_rank, bias=spec.bias)
            self.q_a_layernorm = RMSNorm(spec.q_lora_rank, spec.eps)
            self.q_b_proj = nn.Linear(spec.q_lora_rank, queries, bias=False)
        self.kv_a_proj = nn.Linear(
            hidden_size, spec.kv_lora_rank + spec.qk_rope_head_dim, bias=spec.bias
        )
        self.kv_a_layernorm = RMSNorm(spec.kv_lora_rank, spec.eps)
        self.k_up = HeadMap(spec.num_heads, spec.qk_nope_head_dim, spec.kv_lora_rank)
        self.v_up = HeadMap(spec.num_heads, spec.kv_lora_rank, spec.v_head_dim)
        self.o_proj = nn.Linear(spec.num_heads * spec.v_head_dim, hidden_size, bias=spec.bias)

    @property
    def state_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, width) of the one tensor that is kept a token."""
        return {"latent": (1, self.spec.kv_lora_rank + self.spec.qk_rope_head_dim)}

    def forward(self, x: Tensor, cache: Cache, context: AttentionContext) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size], cache [B, 1, P, C + R] -> output like x, cache [B, 1, P + S, C + R]."""
        spec = self.spec
        heads = split_heads(self._queries(x), spec.num_heads)
        plain, turning = heads[..., : -spec.qk_rope_head_dim], heads[..., -spec.qk_rope_head_dim :]
        both = self.kv_a_proj(x)
        compressed, shared_key = both[..., : spec.kv_lora_rank], both[..., spec.kv_lora_rank :]
        turned = self._rotate(turning.flatten(-2), context, spec.num_heads)
        query = torch.cat((self.k_up(plain), split_heads(turned, spec.num_heads)), dim=-1).flatten(
            -2
        )
        latent = torch.cat(
            (self.kv_a_layernorm(compressed), self._rotate(shared_key, context, 1)), dim=-1
        )
        mixed, grown = latent_attention(
            query,
            latent,
            cache[0],
            context.attention_mask,
            spec.num_heads,
            spec.kv_lora_rank,
            spec.scale,
        )
        values = self.v_up(split_heads(mixed, spec.num_heads))
        return self.o_proj(values.flatten(-2)), (grown,)

    def _queries(self, x: Tensor) -> Tensor:
        if self.spec.q_lora_rank is None:
            plain: Tensor = self.q_proj(x)
            return plain
        compressed: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return compressed

    def _rotate(self, x: Tensor, context: AttentionContext, heads: int) -> Tensor:
        return rotary(
            x, context.position_ids, context.tables["default"], heads, self.spec.interleaved
        )


class HeadMap(nn.Module):
    """A linear map of its own for each head: [..., H, inputs] -> [..., H, outputs]."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, inputs, outputs).normal_(std=inputs**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H, inputs] -> [B, S, H, outputs]."""
        return (x.transpose(1, 2) @ self.weight).transpose(1, 2)

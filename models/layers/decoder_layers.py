"""Decoder layers: how attention, the feed-forward block, norms and the residual stream go together.

Legend of shapes: B rows, S new tokens a row.
"""

from __future__ import annotations

from torch import Tensor, nn

from onnxlm.models.layers.attention import AttentionContext, Cache


class DecoderLayer(nn.Module):
    """Pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        attention: The attention block.
        mlp: The feed-forward block.
        input_norm: In front of attention.
        mlp_norm: In front of the feed-forward block.
        residual_multiplier: Factor of both branches.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        input_norm: nn.Module,
        mlp_norm: nn.Module,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = input_norm
        self.post_attention_layernorm = mlp_norm
        self.residual_multiplier = residual_multiplier

    def forward(self, x: Tensor, cache: Cache, context: AttentionContext) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size] -> the same, and the layer's grown cache."""
        mixed, cache = self.self_attn(self.input_layernorm(x), cache, context)
        x = x + self._scaled(mixed)
        return x + self._scaled(self.mlp(self.post_attention_layernorm(x))), cache

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.residual_multiplier == 1.0 else branch * self.residual_multiplier


class ParallelLayer(nn.Module):
    """Attention and feed-forward block side by side: x + attention(norm(x)) + mlp(norm(x)).

    Source: Wang and Komatsuzaki, "GPT-J-6B" (2021); Chowdhery et al., "PaLM" (2022), section 2.

    Args:
        attention: The attention block.
        mlp: The feed-forward block.
        input_norm: In front of attention.
        mlp_norm: In front of the feed-forward block; None when the two share one norm.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        input_norm: nn.Module,
        mlp_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = input_norm
        self.post_attention_layernorm = mlp_norm

    def forward(self, x: Tensor, cache: Cache, context: AttentionContext) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size] -> the same, and the layer's grown cache."""
        normed = self.input_layernorm(x)
        mixed, cache = self.self_attn(normed, cache, context)
        own = normed if self.post_attention_layernorm is None else self.post_attention_layernorm(x)
        return x + (mixed + self.mlp(own)), cache


class PostNormLayer(nn.Module):
    """Norms behind the residual sums: norm(alpha * x + attention(x)), then norm(alpha * x + mlp(x)).

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.1; with alpha above 1 DeepNorm:
    Wang et al., "DeepNet" (2022), section 3.

    Args:
        attention: The attention block.
        mlp: The feed-forward block.
        attention_norm: Behind the first sum.
        mlp_norm: Behind the second sum.
        alpha: Factor of the residual.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        attention_norm: nn.Module,
        mlp_norm: nn.Module,
        alpha: float = 1.0,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.attention_norm = attention_norm
        self.mlp_norm = mlp_norm
        self.alpha = alpha

    def forward(self, x: Tensor, cache: Cache, context: AttentionContext) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size] -> the same, and the layer's grown cache."""
        mixed, cache = self.self_attn(x, cache, context)
        x = self.attention_norm(self._kept(x) + mixed)
        return self.mlp_norm(self._kept(x) + self.mlp(x)), cache

    def _kept(self, x: Tensor) -> Tensor:
        return x if self.alpha == 1.0 else x * self.alpha


class SandwichLayer(nn.Module):
    """Norms behind each branch, before it is added, and (but for OLMo 2) in front of it too.

    Source: Ding et al., "CogView" (2021), section 2.4 (sandwich); Gemma 2 (2024); OLMo 2 (2025), section 3.

    Args:
        attention: The attention block.
        mlp: The feed-forward block.
        behind: Norms behind attention and behind the feed-forward block.
        before: Norms in front of them, or None.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        behind: tuple[nn.Module, nn.Module],
        before: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.post_attention_layernorm, self.post_feedforward_layernorm = behind
        self.input_layernorm = None if before is None else before[0]
        self.pre_feedforward_layernorm = None if before is None else before[1]

    def forward(self, x: Tensor, cache: Cache, context: AttentionContext) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size] -> the same, and the layer's grown cache."""
        mixed, cache = self.self_attn(_maybe(self.input_layernorm, x), cache, context)
        x = x + self.post_attention_layernorm(mixed)
        inner = self.mlp(_maybe(self.pre_feedforward_layernorm, x))
        return x + self.post_feedforward_layernorm(inner), cache


def _maybe(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)

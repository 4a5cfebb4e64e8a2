"""A decoder-only language model put together from blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onnxlm.models.layers.attention import AttentionContext, Cache


class DecoderLayer(nn.Module):
    """Pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, input_norm: nn.Module, mlp_norm: nn.Module
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = input_norm
        self.post_attention_layernorm = mlp_norm

    def forward(self, x: Tensor, cache: Cache, context: AttentionContext) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size] -> the same, and the layer's grown cache."""
        mixed, cache = self.self_attn(self.input_layernorm(x), cache, context)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class DecoderLM(nn.Module):
    """Embedding, layers, final norm, LM head.

    Args:
        embedding: Token table.
        layers: The decoder layers.
        norm: Final norm.
        lm_head: Projection to the vocabulary; tie it by sharing `embedding.weight`.
        cache_shape: (Hkv, D) of every layer's key and value cache.
        rope: Rotary cosines and sines [M, R/2], or None.
    """

    rope_cos: Tensor | None
    rope_sin: Tensor | None

    def __init__(
        self,
        embedding: nn.Embedding,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        lm_head: nn.Linear,
        cache_shape: tuple[int, int],
        rope: tuple[Tensor, Tensor] | None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.cache_shape = cache_shape
        self.register_buffer("rope_cos", rope[0] if rope else None, persistent=False)
        self.register_buffer("rope_sin", rope[1] if rope else None, persistent=False)

    def empty_cache(self, batch_size: int) -> list[Cache]:
        """Caches without a column: 2 x [B, Hkv, 0, D] a layer."""
        heads, width = self.cache_shape
        empty = self.embed_tokens.weight.new_zeros((batch_size, heads, 0, width))
        return [(empty, empty) for _ in self.layers]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Sequence[Cache] | None = None,
    ) -> tuple[Tensor, list[Cache]]:
        """Run S new tokens of each row behind P cached ones.

        Args:
            input_ids: int64 [B, S].
            attention_mask: int64 [B, P + S], 1 for real tokens; all real when None.
            past_key_values: A (key, value) pair [B, Hkv, P, D] a layer; empty when None.

        Returns:
            Logits [B, S, vocab_size] and the grown caches [B, Hkv, P + S, D].
        """
        past = self.empty_cache(input_ids.shape[0]) if past_key_values is None else past_key_values
        new_tokens = input_ids.shape[1]
        if attention_mask is None:
            columns = past[0][0].shape[2] + new_tokens
            attention_mask = input_ids.new_ones((input_ids.shape[0], columns))
        # A padding column before the first real token gets position 0, never -1: it indexes a table.
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        positions = positions[:, attention_mask.shape[1] - new_tokens :]
        tables = None
        if self.rope_cos is not None and self.rope_sin is not None:
            tables = (self.rope_cos, self.rope_sin)
        context = AttentionContext(attention_mask, positions, tables)
        x = self.embed_tokens(input_ids)
        present: list[Cache] = []
        for layer, cache in zip(self.layers, past, strict=True):
            x, grown = layer(x, cache, context)
            present.append(grown)
        return self.lm_head(self.norm(x)), present

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [sequence_length, vocab_size] of one row run at once."""
        logits: Tensor = self(torch.tensor([list(token_ids)]))[0]
        return logits[0].float()

"""A decoder-only language model put together from blocks.

Legend of shapes: B rows, S new tokens a row, P cached columns, V vocabulary size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from onnxlm.models.layers.attention import AttentionContext, Cache
from onnxlm.models.layers.distance_bias import distance_bias
from onnxlm.models.layers.rotate import Tables


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


@dataclass(frozen=True)
class Scaling:
    """Constants around the layers; each changes nothing by default.

    Attributes:
        embedding: Factor of the embeddings.
        logits: Factor of the logits.
        softcap: Logits become softcap * tanh(logits / softcap); 0 means off.
    """

    embedding: float = 1.0
    logits: float = 1.0
    softcap: float = 0.0


class DecoderLM(nn.Module):
    """Embedding, layers, final norm, LM head.

    Args:
        embedding: Token table.
        layers: The decoder layers; each has an attention block `self_attn` that says its `state_shapes`.
        norm: Final norm; None for none.
        lm_head: Projection to the vocabulary; tie it by sharing `embedding.weight`.
        rope: Rotary cosines and sines [M, R/2] by the name that attention blocks ask for.
        positions: Module that maps position ids [B, S] to vectors that are added to the embeddings.
        embedding_norm: Norm behind the embedding.
        projections: From the embedding's width to the layers' and back, where they differ (OPT).
        bias_table: Attention bias by distance [H, L], see `distance_bias`; a buffer, or shared by all layers.
        bias_from_end: Distances are counted from position L - 1 instead of a query's own: the bias depends on
            the key alone.
        scaling: Constants.
        switch_positions: (n, offset): rows longer than n take the rotary rows behind `offset` (LongRoPE).
        max_positions: Most positions of a row, where no table says so.
    """

    bias_table: Tensor | None

    def __init__(
        self,
        embedding: nn.Embedding,
        layers: Sequence[nn.Module],
        norm: nn.Module | None,
        lm_head: nn.Linear,
        rope: Mapping[str, Tables] | None = None,
        *,
        positions: nn.Module | None = None,
        embedding_norm: nn.Module | None = None,
        projections: tuple[nn.Module, nn.Module] | None = None,
        bias_table: Tensor | None = None,
        bias_from_end: bool = False,
        scaling: Scaling = Scaling(),
        switch_positions: tuple[int, int] | None = None,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.embed_positions = positions
        self.embed_norm = embedding_norm
        self.project_in = None if projections is None else projections[0]
        self.project_out = None if projections is None else projections[1]
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.scaling = scaling
        self.switch_positions = switch_positions
        self._max_positions = max_positions
        self.register_buffer("bias_table", bias_table, persistent=False)
        self._bias_from_end = bias_from_end
        self._tables = tuple(rope or {})
        for name, (cos, sin) in (rope or {}).items():
            self.register_buffer(f"rope_{name}_cos", cos, persistent=False)
            self.register_buffer(f"rope_{name}_sin", sin, persistent=False)

    @property
    def max_positions(self) -> int | None:
        """Most positions of a row, as the tables say or as was given; None where nothing limits them."""
        before = 0 if self.switch_positions is None else self.switch_positions[1]
        rows = [self.get_buffer(f"rope_{name}_cos").shape[0] - before for name in self._tables]
        if self.bias_table is not None:
            rows.append(self.bias_table.shape[1])
        positions = getattr(self.embed_positions, "max_positions", None)
        given = [rows for rows in (self._max_positions, positions) if rows is not None]
        return min([*rows, *given], default=None)

    @property
    def state_shapes(self) -> list[dict[str, tuple[int, int]]]:
        """(heads, width) of each tensor that is kept a token, by its name, a layer."""
        return [cast(Any, layer).self_attn.state_shapes for layer in self.layers]

    def empty_cache(self, batch_size: int) -> list[Cache]:
        """Caches without a column: [B, heads, 0, width] for each state of a layer."""
        weight = self.embed_tokens.weight
        return [
            tuple(weight.new_zeros((batch_size, heads, 0, width)) for heads, width in kept.values())
            for kept in self.state_shapes
        ]

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
            past_key_values: A layer's states [B, heads, P, width], for each layer; empty when None.

        Returns:
            Logits [B, S, V] and the grown caches [B, heads, P + S, width].
        """
        past = self.empty_cache(input_ids.shape[0]) if past_key_values is None else past_key_values
        if attention_mask is None:
            columns = past[0][0].shape[2] + input_ids.shape[1]
            attention_mask = input_ids.new_ones((input_ids.shape[0], columns))
        context = self._context(attention_mask, input_ids.shape[1])
        x = self._embed(input_ids, context.position_ids)
        context = self._switched(context)
        present: list[Cache] = []
        for layer, cache in zip(self.layers, past, strict=True):
            x, grown = layer(x, cache, context)
            present.append(grown)
        return self._logits(x), present

    def _context(self, attention_mask: Tensor, new_tokens: int) -> AttentionContext:
        # A padding column before the first real token gets position 0, never -1: it indexes a table.
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        positions = positions[:, attention_mask.shape[1] - new_tokens :]
        bias = None
        if self.bias_table is not None:
            last = self.bias_table.shape[1] - 1
            origin = torch.full_like(positions, last) if self._bias_from_end else positions
            bias = distance_bias(self.bias_table, attention_mask, origin)
        tables = {
            name: (self.get_buffer(f"rope_{name}_cos"), self.get_buffer(f"rope_{name}_sin"))
            for name in self._tables
        }
        return AttentionContext(attention_mask, positions, tables, bias)

    def _switched(self, context: AttentionContext) -> AttentionContext:
        """Positions that look up rotary tables: a row longer than the limit reads the second half."""
        if self.switch_positions is None:
            return context
        limit, offset = self.switch_positions
        longer = (context.attention_mask.sum(1, keepdim=True) > limit).to(torch.int64)
        rows = context.position_ids + offset * longer
        return dataclasses.replace(context, position_ids=rows, by_position=True)

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        if self.scaling.embedding != 1.0:
            x = x * self.scaling.embedding
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        return x if self.embed_norm is None else self.embed_norm(x)

    def _logits(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        logits: Tensor = self.lm_head(x)
        if self.scaling.logits != 1.0:
            logits = logits * self.scaling.logits
        if self.scaling.softcap:
            logits = self.scaling.softcap * torch.tanh(logits / self.scaling.softcap)
        return logits

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [sequence_length, vocab_size] of one row run at once."""
        logits: Tensor = self(torch.tensor([list(token_ids)]))[0]
        return logits[0].float()

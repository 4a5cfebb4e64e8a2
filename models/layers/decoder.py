"""A decoder-only language model put together from blocks.

Legend of shapes: B rows, S new tokens a row, P cached columns, V vocabulary size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from onnxlm.models.layers.attention import AttentionContext, Cache
from onnxlm.models.layers.distance_bias import distance_bias
from onnxlm.models.layers.rotate import Tables


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


@dataclass(frozen=True)
class Positions:
    """How a model knows where a token stands.

    Attributes:
        rope: Rotary cosines and sines [M, R/2] by the name that attention blocks ask for.
        learned: Module that maps position ids [B, S] to vectors that are added to the embeddings.
        bias_table: Attention bias by distance [H, L], see `distance_bias`.
        bias_from_end: Distances are counted from position L - 1 instead of a query's own: the bias depends on
            the key alone.
        switch: (n, offset): rows longer than n take the rotary rows behind `offset` (LongRoPE).
        limit: Most positions of a row, where no table says so.
    """

    rope: Mapping[str, Tables] = field(default_factory=dict)
    learned: nn.Module | None = None
    bias_table: Tensor | None = None
    bias_from_end: bool = False
    switch: tuple[int, int] | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Bridges:
    """Modules between the embedding and the layers, and between the layers and the head; None for none.

    Attributes:
        embedding_norm: Norm behind the embedding (BLOOM).
        project_in: From the embedding's width to the layers' (OPT).
        project_out: Back, behind the final norm.
    """

    embedding_norm: nn.Module | None = None
    project_in: nn.Module | None = None
    project_out: nn.Module | None = None


class DecoderLM(nn.Module):
    """Embedding, layers, final norm, LM head.

    Args:
        embedding: Token table.
        layers: The decoder layers; each has an attention block `self_attn` that says its `state_shapes`, and
            its `window` where it has one.
        norm: Final norm; None for none.
        lm_head: Projection to the vocabulary; tie it by sharing `embedding.weight`.
        positions: Positions of the tokens.
        scaling: Constants.
        bridges: Modules around the layers.
    """

    bias_table: Tensor | None

    def __init__(
        self,
        embedding: nn.Embedding,
        layers: Sequence[nn.Module],
        norm: nn.Module | None,
        lm_head: nn.Linear,
        positions: Positions = Positions(),
        *,
        scaling: Scaling = Scaling(),
        bridges: Bridges = Bridges(),
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.embed_positions = positions.learned
        self.embed_norm = bridges.embedding_norm
        self.project_in, self.project_out = bridges.project_in, bridges.project_out
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.scaling = scaling
        self._switch, self._limit = positions.switch, positions.limit
        self.register_buffer("bias_table", positions.bias_table, persistent=False)
        self._bias_from_end = positions.bias_from_end
        self._tables = tuple(positions.rope)
        for name, (cos, sin) in positions.rope.items():
            self.register_buffer(f"rope_{name}_cos", cos, persistent=False)
            self.register_buffer(f"rope_{name}_sin", sin, persistent=False)

    @property
    def max_positions(self) -> int | None:
        """Most positions of a row, as the tables say or as was given; None where nothing limits them."""
        before = 0 if self._switch is None else self._switch[1]
        rows = [self.get_buffer(f"rope_{name}_cos").shape[0] - before for name in self._tables]
        if self.bias_table is not None:
            rows.append(self.bias_table.shape[1])
        positions = getattr(self.embed_positions, "max_positions", None)
        given = [rows for rows in (self._limit, positions) if rows is not None]
        return min([*rows, *given], default=None)

    @property
    def state_shapes(self) -> list[dict[str, tuple[int, int]]]:
        """(heads, width) of each tensor that is kept a token, by its name, a layer."""
        return [cast(Any, layer).self_attn.state_shapes for layer in self.layers]

    @property
    def windows(self) -> list[int]:
        """Tokens that a layer's queries see of its states, which may lack older ones; 0 for all of them.

        All where scores have a bias: it has a column for every token.
        """
        if self.bias_table is not None:
            return [0] * len(self.layers)
        return [getattr(cast(Any, layer).self_attn, "window", 0) for layer in self.layers]

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
        if self._switch is None:
            return context
        limit, offset = self._switch
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

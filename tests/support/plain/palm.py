"""PaLM by its paper's sections 2 and 5, and the formulas that they refer to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from support.plain import PlainModel, causal_softmax, layer_norm


def turned(x: Tensor, theta: float) -> Tensor:
    """Su et al. (2021), eq. 34: row m of [S, D], pairs (2i, 2i + 1) turned by m / theta^(2i / D)."""
    rows, width = x.shape
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angles = torch.arange(rows, dtype=x.dtype)[:, None] * frequencies
    a, b = x[:, 0::2], x[:, 1::2]
    pairs = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return torch.stack(pairs, dim=-1).flatten(1)


class Palm(PlainModel):
    """Attention and SwiGLU side by side, one key-value head, no bias anywhere, tied and scaled head."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        model, inner = c["hidden_size"], c["intermediate_size"]
        heads, width = c["num_attention_heads"] * c["head_dim"], c["head_dim"]
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (c["vocab_size"], model),
            "model.norm.weight": (model,),
        }
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            shapes |= {
                f"{layer}.input_layernorm.weight": (model,),
                f"{layer}.self_attn.q_proj.weight": (heads, model),
                f"{layer}.self_attn.k_proj.weight": (width, model),
                f"{layer}.self_attn.v_proj.weight": (width, model),
                f"{layer}.self_attn.o_proj.weight": (model, heads),
                f"{layer}.mlp.gate_proj.weight": (inner, model),
                f"{layer}.mlp.up_proj.weight": (inner, model),
                f"{layer}.mlp.down_proj.weight": (model, inner),
            }
        return shapes

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weight(f"{name}.weight").T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, self.weight(f"{name}.weight"), None, self.config["layer_norm_eps"])

    def attention(self, x: Tensor, name: str) -> Tensor:
        width, theta = self.config["head_dim"], self.config["rope_theta"]
        queries, key, value = (self.linear(x, f"{name}.{part}_proj") for part in "qkv")
        key = turned(key, theta)
        heads = []
        for start in range(0, queries.shape[1], width):
            query = turned(queries[:, start : start + width], theta)
            heads.append(causal_softmax(query @ key.T / math.sqrt(width)) @ value)
        return self.linear(torch.cat(heads, dim=-1), f"{name}.o_proj")

    def swiglu(self, x: Tensor, name: str) -> Tensor:
        """Shazeer (2020), eq. 6."""
        gate = self.linear(x, f"{name}.gate_proj")
        inner = gate / (1 + (-gate).exp()) * self.linear(x, f"{name}.up_proj")
        return self.linear(inner, f"{name}.down_proj")

    def logits(self, ids: Tensor) -> Tensor:
        table = self.weight("model.embed_tokens.weight")
        x = table[ids]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            normed = self.norm(x, f"{layer}.input_layernorm")
            x = x + self.swiglu(normed, f"{layer}.mlp")
            x = x + self.attention(normed, f"{layer}.self_attn")
        return self.norm(x, "model.norm") @ table.T / math.sqrt(table.shape[1])


MODEL = Palm

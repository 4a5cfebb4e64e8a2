"""GPT-3 by its paper's section 2.1 and the formulas that it refers to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from support.plain import PlainModel, causal_softmax, layer_norm


def gelu(x: Tensor) -> Tensor:
    """Hendrycks and Gimpel (2016), section 2: the form with a hyperbolic tangent."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Gpt3(PlainModel):
    """Learned positions, norms in front, every query sees every token up to its own, tied head."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        model, heads = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
        inner = c.get("intermediate_size") or 4 * model
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (c["vocab_size"], model),
            "model.embed_positions.weight": (c["max_position_embeddings"], model),
            "model.norm.weight": (model,),
            "model.norm.bias": (model,),
        }
        products = {
            **{f"self_attn.{name}_proj": (heads, model) for name in "qkv"},
            "self_attn.o_proj": (model, heads),
            "mlp.up_proj": (inner, model),
            "mlp.down_proj": (model, inner),
        }
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            for name, shape in products.items():
                shapes[f"{layer}.{name}.weight"] = shape
                shapes[f"{layer}.{name}.bias"] = shape[:1]
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{layer}.{norm}.weight"] = shapes[f"{layer}.{norm}.bias"] = (model,)
        return shapes

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weight(f"{name}.weight").T + self.weight(f"{name}.bias")

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config["layer_norm_eps"]
        return layer_norm(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), eps)

    def attention(self, x: Tensor, name: str) -> Tensor:
        width = self.config["head_dim"]
        q, k, v = (self.linear(x, f"{name}.{part}_proj") for part in "qkv")
        heads = []
        for start in range(0, q.shape[1], width):
            columns = slice(start, start + width)
            scores = q[:, columns] @ k[:, columns].T / math.sqrt(width)
            heads.append(causal_softmax(scores) @ v[:, columns])
        return self.linear(torch.cat(heads, dim=-1), f"{name}.o_proj")

    def logits(self, ids: Tensor) -> Tensor:
        table = self.weight("model.embed_tokens.weight")
        x = table[ids] + self.weight("model.embed_positions.weight")[: len(ids)]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            x = x + self.attention(self.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            inner = self.norm(x, f"{layer}.post_attention_layernorm")
            inner = gelu(self.linear(inner, f"{layer}.mlp.up_proj"))
            x = x + self.linear(inner, f"{layer}.mlp.down_proj")
        return self.norm(x, "model.norm") @ table.T


MODEL = Gpt3

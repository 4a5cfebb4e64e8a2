"""A model of one's own: a combination of blocks that no family has, and its weights.

`python examples/own_model.py own.safetensors` writes random weights; train yours instead. Then
`onnxlm export examples/own_model.py:build own --weights own.safetensors` and `onnxlm verify own`.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import nn

from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Positions, Scaling
from onnxlm.models.layers.decoder_layers import SandwichLayer
from onnxlm.models.layers.mlp import MLP
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotary import RopeConfig, rope_tables

VOCABULARY, HIDDEN, INNER, LAYERS, CONTEXT = 512, 128, 256, 4, 256
HEADS, KV_HEADS, WIDTH = 8, 2, 32


def build() -> DecoderLM:
    """Windowed attention with normed queries and keys, squared ReLU, sandwich norms, capped logits."""

    def layer(index: int) -> SandwichLayer:
        spec = AttentionSpec(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            scale=WIDTH**-0.5,
            sliding_window=32 if index % 2 else 0,
        )
        return SandwichLayer(
            Attention(
                HIDDEN,
                WIDTH,
                spec,
                AttentionOptions(qkv_bias=True),
                norms=(RMSNorm(WIDTH, 1e-6), RMSNorm(WIDTH, 1e-6)),
            ),
            MLP(HIDDEN, INNER, bias=False, activation="relu2"),
            behind=(RMSNorm(HIDDEN, 1e-6), RMSNorm(HIDDEN, 1e-6)),
            before=(RMSNorm(HIDDEN, 1e-6), RMSNorm(HIDDEN, 1e-6)),
        )

    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head.weight = embedding.weight
    return DecoderLM(
        embedding,
        [layer(index) for index in range(LAYERS)],
        RMSNorm(HIDDEN, 1e-6),
        head,
        Positions(rope={"default": rope_tables(RopeConfig(rope_theta=50000.0), WIDTH, CONTEXT)}),
        scaling=Scaling(softcap=30.0),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    model = build()
    save_file(dict(model.named_parameters()), sys.argv[1])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {sys.argv[1]}")

"""PaLM, from its paper.

Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), section 2: attention and
SwiGLU side by side behind one norm, one key-value head, rotary positions (in the pairs of Su et al., 2021,
eq. 34), one table for embedding and head, no biases in products or norms; section 5: logits are scaled by
1 / sqrt(d_model). Weights were not published; the names of a checkpoint's tensors are this project's.
"""

from __future__ import annotations

from onnxlm.models.architectures._common import ATTENTION, MLP, OUTER, gated_mlp, rotary_lm
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Scaling
from onnxlm.models.layers.decoder_layers import ParallelLayer
from onnxlm.models.layers.norm import LayerNorm
from onnxlm.models.registry import Architecture
from onnxlm.models.weight_rules import under


def _parse_config(reader: ConfigReader) -> RotaryConfig:
    fields = reader.model_fields(tied=True)
    reader.only("tie_word_embeddings", True)
    reader.only("num_key_value_heads", 1)
    config = RotaryConfig(
        **fields,
        intermediate_size=reader.positive("intermediate_size", 4 * fields["hidden_size"]),
        num_key_value_heads=1,
        head_dim=reader.positive("head_dim", 256),
        rms_norm_eps=reader.get("layer_norm_eps", float, 1e-6),
        rope=reader.rope(),
    )
    reader.finish()
    return config


def _build(config: RotaryConfig) -> DecoderLM:
    scale = config.head_dim**-0.5
    spec = AttentionSpec(config.num_attention_heads, 1, scale, interleaved=True)

    def norm() -> LayerNorm:
        return LayerNorm(config.hidden_size, config.rms_norm_eps, bias=False)

    def layer() -> ParallelLayer:
        attention = Attention(config.hidden_size, config.head_dim, spec)
        return ParallelLayer(attention, gated_mlp(config), norm())

    layers = [layer() for _ in range(config.num_hidden_layers)]
    scaling = Scaling(logits=config.hidden_size**-0.5)
    return rotary_lm(config, layers, norm(), scaling=scaling)


_NORM = {"input_layernorm": "input_layernorm"}

ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={**OUTER, **under("model.layers.{i}", {**ATTENTION, **MLP, **_NORM})},
    tiny={
        "model_type": "palm",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
)

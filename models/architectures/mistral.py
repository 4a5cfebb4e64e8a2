"""Mistral 7B and its descendants of `model_type` "mistral": Llama with a sliding window.

Source: Jiang et al., "Mistral 7B" (2023), section 2.
"""

from __future__ import annotations

from onnxlm.models.architectures._common import LAYER, OUTER, gated_mlp, rms_norm, rotary_lm
from onnxlm.models.architectures._windows import WindowedConfig
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.registry import Architecture
from onnxlm.models.weight_rules import under


def _parse_config(reader: ConfigReader) -> WindowedConfig:
    fields = reader.rotary_fields(biases=False, positions=131072, rope=reader.rope(longrope=True))
    window = reader.optional("sliding_window", int, 4096) or 0
    config = WindowedConfig(**fields, sliding_windows=(window,) * fields["num_hidden_layers"])
    reader.finish()
    return config


def build(config: WindowedConfig) -> DecoderLM:
    """Llama's layers without biases, each with its window."""

    def layer(window: int) -> DecoderLayer:
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            scale=config.head_dim**-0.5,
            sliding_window=window,
        )
        return DecoderLayer(
            Attention(config.hidden_size, config.head_dim, spec),
            gated_mlp(config),
            rms_norm(config),
            rms_norm(config),
        )

    layers = [layer(window) for window in config.sliding_windows]
    return rotary_lm(config, layers, rms_norm(config))


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=build,
    rules={**OUTER, **under("model.layers.{i}", LAYER)},
    tiny={
        "model_type": "mistral",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": 7,
    },
    variants={"no window": {"sliding_window": None, "num_key_value_heads": 1}},
)

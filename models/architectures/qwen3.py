"""Qwen3: Llama with norms of each head's queries and keys, some layers with a window.

Source: Yang et al., "Qwen3 Technical Report" (2025), section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import (
    LAYER,
    OUTER,
    QK_NORMS,
    gated_mlp,
    rms_norm,
    rotary_lm,
)
from onnxlm.models.architectures._windows import WindowedConfig
from onnxlm.models.architectures.qwen2 import qwen_windows
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


def _parse_config(reader: ConfigReader) -> WindowedConfig:
    fields = reader.rotary_fields(
        biases=False, positions=32768, head_dim=128, rope=reader.rope(longrope=True)
    )
    config = WindowedConfig(
        **fields,
        attention_bias=reader.get("attention_bias", bool, False),
        sliding_windows=qwen_windows(reader, fields["num_hidden_layers"]),
    )
    reader.finish()
    return config


def _build(config: WindowedConfig) -> DecoderLM:
    options = AttentionOptions(qkv_bias=config.attention_bias, out_bias=config.attention_bias)

    def head_norm() -> RMSNorm:
        return RMSNorm(config.head_dim, config.rms_norm_eps)

    def layer(window: int) -> DecoderLayer:
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            scale=config.head_dim**-0.5,
            sliding_window=window,
        )
        norms = (head_norm(), head_norm())
        return DecoderLayer(
            Attention(config.hidden_size, config.head_dim, spec, options, norms),
            gated_mlp(config),
            rms_norm(config),
            rms_norm(config),
        )

    layers = [layer(window) for window in config.sliding_windows]
    return rotary_lm(config, layers, rms_norm(config))


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.rotary_config(own, "qwen3", "Qwen3ForCausalLM")
    biases = {"attention_bias": gguf.attention_biases(own)}
    return config | biases | {"use_sliding_window": False}


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={**OUTER, **under("model.layers.{i}", {**LAYER, **QK_NORMS})},
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.QWEN3),
        config=_gguf_config,
        rules=gguf.named({**gguf.LAYER, **gguf.QK_NORMS}),
    ),
    tiny={
        "model_type": "qwen3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    },
    variants={
        "biases, odd heads, layer_types": {
            "attention_bias": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
)

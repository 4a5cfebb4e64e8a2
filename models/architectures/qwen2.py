"""Qwen1.5, Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, some layers with a window.

Source: Yang et al., "Qwen2 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import LAYER, OUTER, gated_mlp, rms_norm, rotary_lm
from onnxlm.models.architectures._windows import WindowedConfig, sliding_windows
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


def qwen_windows(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """The layers from `max_window_layers` on have a window where `use_sliding_window` is true."""
    used = reader.get("use_sliding_window", bool, False)
    given = reader.optional("sliding_window", int, 4096)
    window = given if used else None
    first = reader.get("max_window_layers", int, 28)
    return sliding_windows(
        reader, layers, window, lambda index: window is not None and index >= first
    )


def _parse_config(reader: ConfigReader) -> WindowedConfig:
    fields = reader.rotary_fields(biases=False, positions=32768, rope=reader.rope(longrope=True))
    windows = qwen_windows(reader, fields["num_hidden_layers"])
    config = WindowedConfig(**fields, sliding_windows=windows)
    reader.finish()
    return config


def _build(config: WindowedConfig) -> DecoderLM:
    def layer(window: int) -> DecoderLayer:
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            scale=config.head_dim**-0.5,
            sliding_window=window,
        )
        options = AttentionOptions(qkv_bias=True)
        return DecoderLayer(
            Attention(config.hidden_size, config.head_dim, spec, options),
            gated_mlp(config),
            rms_norm(config),
            rms_norm(config),
        )

    layers = [layer(window) for window in config.sliding_windows]
    return rotary_lm(config, layers, rms_norm(config))


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.rotary_config(own, "qwen2", "Qwen2ForCausalLM")
    return config | {"use_sliding_window": False}


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={**OUTER, **under("model.layers.{i}", LAYER)},
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.QWEN2),
        config=_gguf_config,
        rules=gguf.named(gguf.LAYER),
    ),
    tiny={
        "model_type": "qwen2",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    variants={
        "untied, a window in the second layer, yarn": {
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    },
)

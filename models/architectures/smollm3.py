"""SmolLM3: Llama, every fourth of whose layers has no positions.

Source: Hugging Face, "SmolLM3" (2025); Yang et al., "Rope to Nope and Back Again" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR

from onnxlm.errors import ConfigError
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


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(WindowedConfig):
    """SmolLM3's numbers, by Hugging Face key name.

    Attributes:
        no_rope_layers: 1 for a layer that turns queries and keys, 0 for one that does not.
    """

    no_rope_layers: tuple[int, ...]


def _turning_layers(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    interval = reader.positive("no_rope_layer_interval", 4)
    given = reader.a_layer_each("no_rope_layers", int, layers)
    if given is None:
        return tuple(int((index + 1) % interval != 0) for index in range(layers))
    if set(given) - {0, 1}:
        raise ConfigError("field 'no_rope_layers'", found=given, allowed="0 and 1")
    return given


def _parse_config(reader: ConfigReader) -> SmolLM3Config:
    rope = reader.rope(2_000_000.0, longrope=True)
    fields = reader.rotary_fields(tied=True, positions=32768, rope=rope)
    layers = fields["num_hidden_layers"]
    reader.unused("max_window_layers")  # of Qwen's configs; `layer_types` says which have a window
    turning = _turning_layers(reader, layers)
    used = reader.get("use_sliding_window", bool, False)
    given = reader.optional("sliding_window", int)
    window = given if used else None
    config = SmolLM3Config(
        **fields,
        no_rope_layers=turning,
        sliding_windows=sliding_windows(
            reader, layers, window, lambda index: window is not None and not turning[index]
        ),
    )
    reader.finish()
    return config


def _build(config: SmolLM3Config) -> DecoderLM:
    def layer(window: int, turns: int) -> DecoderLayer:
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            scale=config.head_dim**-0.5,
            sliding_window=window,
        )
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            rope="default" if turns else None,
        )
        return DecoderLayer(
            Attention(config.hidden_size, config.head_dim, spec, options),
            gated_mlp(config),
            rms_norm(config),
            rms_norm(config),
        )

    layers = [
        layer(window, turns)
        for window, turns in zip(config.sliding_windows, config.no_rope_layers, strict=True)
    ]
    return rotary_lm(config, layers, rms_norm(config))


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    return {
        **gguf.rotary_config(own, "smollm3", "SmolLM3ForCausalLM"),
        "attention_bias": gguf.attention_biases(own),
        "mlp_bias": gguf.in_first_layer(own, MODEL_TENSOR.FFN_GATE, "bias"),
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={**OUTER, **under("model.layers.{i}", LAYER)},
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.SMOLLM3),
        config=_gguf_config,
        rules=gguf.named(gguf.LAYER),
        permuted=gguf.PERMUTED,
    ),
    tiny={
        "model_type": "smollm3",
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
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 2,
        "pad_token_id": 0,
    },
    variants={
        "biases, untied, first without positions and with a window": {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 6,
            "no_rope_layers": [0, 1],
        },
    },
)

"""Granite 3: Llama with constants on the embeddings, both branches, the scores and the logits.

Source: IBM, "Granite 3.0 Language Models" (2024), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import LAYER, OUTER, gated_mlp, rms_norm, rotary_lm
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Scaling
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(RotaryConfig):
    """Granite's numbers, by Hugging Face key name.

    Attributes:
        embedding_multiplier: Factor of the embeddings.
        residual_multiplier: Factor of both branches of a layer.
        attention_multiplier: Factor of the scores, in place of the root of the width.
        logits_scaling: Divisor of the logits.
    """

    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_scaling: float


def _parse_config(reader: ConfigReader) -> GraniteConfig:
    reader.same("num_key_value_heads", "num_attention_heads")
    config = GraniteConfig(
        **reader.rotary_fields(rope=reader.rope(longrope=True)),
        embedding_multiplier=reader.get("embedding_multiplier", float, 1.0),
        residual_multiplier=reader.get("residual_multiplier", float, 1.0),
        attention_multiplier=reader.get("attention_multiplier", float, 1.0),
        logits_scaling=reader.positive_float("logits_scaling", 1.0),
    )
    reader.finish()
    return config


def _build(config: GraniteConfig) -> DecoderLM:
    spec = AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        scale=config.attention_multiplier,
    )
    options = AttentionOptions(qkv_bias=config.attention_bias, out_bias=config.attention_bias)

    def layer() -> DecoderLayer:
        return DecoderLayer(
            Attention(config.hidden_size, config.head_dim, spec, options),
            gated_mlp(config),
            rms_norm(config),
            rms_norm(config),
            config.residual_multiplier,
        )

    layers = [layer() for _ in range(config.num_hidden_layers)]
    scaling = Scaling(config.embedding_multiplier, 1 / config.logits_scaling)
    return rotary_lm(config, layers, rms_norm(config), scaling=scaling)


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    own.only(Keys.Rope.SCALING_FINETUNED, True)  # false turns rotary positions off here
    return {
        **gguf.rotary_config(own, "granite", "GraniteForCausalLM"),
        "attention_bias": gguf.attention_biases(own),
        "mlp_bias": gguf.in_first_layer(own, MODEL_TENSOR.FFN_GATE, "bias"),
        "embedding_multiplier": own.get(Keys.LLM.EMBEDDING_SCALE, 1.0),
        "residual_multiplier": own.get(Keys.LLM.RESIDUAL_SCALE, 1.0),
        "attention_multiplier": own.get(Keys.Attention.SCALE, gguf.head_dim(own) ** -0.5),
        "logits_scaling": own.get(Keys.LLM.LOGIT_SCALE, 1.0),
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={**OUTER, **under("model.layers.{i}", LAYER)},
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.GRANITE),
        config=_gguf_config,
        rules=gguf.named(gguf.LAYER),
        permuted=gguf.PERMUTED,
    ),
    tiny={
        "model_type": "granite",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    },
    variants={
        "biases, untied, other constants": {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 1.5,
            "attention_multiplier": 0.5,
            "logits_scaling": 0.5,
        },
    },
)

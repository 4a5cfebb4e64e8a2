"""Command R and Aya 23: attention and feed-forward block side by side, norms without biases.

Source: Cohere, "Command R" (2024), as transformers has it. Rotary pairs are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys
from torch import nn

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import (
    LAYER,
    OUTER,
    QK_NORMS,
    gated_mlp,
    rotary_lm,
)
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Scaling
from onnxlm.models.layers.decoder_layers import ParallelLayer
from onnxlm.models.layers.norm import HeadNorm, LayerNorm
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class CohereConfig(RotaryConfig):
    """Cohere's numbers, by Hugging Face key name.

    Attributes:
        logit_scale: Factor of the logits.
        use_qk_norm: Queries and keys have norms with a weight vector for each head.
    """

    logit_scale: float
    use_qk_norm: bool


def _parse_config(reader: ConfigReader) -> CohereConfig:
    reader.unused("model_max_length")  # of the tokenizer
    reader.same("num_key_value_heads", "num_attention_heads")
    eps = reader.get("layer_norm_eps", float, 1e-5)
    rope = reader.rope(500_000.0, longrope=True)
    fields = reader.rotary_fields(tied=True, eps=eps, biases=False, positions=8192, rope=rope)
    config = CohereConfig(
        **fields,
        attention_bias=reader.get("attention_bias", bool, False),
        logit_scale=reader.get("logit_scale", float, 0.0625),
        use_qk_norm=reader.get("use_qk_norm", bool, False),
    )
    reader.finish()
    return config


def _build(config: CohereConfig) -> DecoderLM:
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    spec = AttentionSpec(heads, keys, config.head_dim**-0.5, interleaved=True)
    options = AttentionOptions(qkv_bias=config.attention_bias, out_bias=config.attention_bias)

    def norm() -> LayerNorm:
        return LayerNorm(config.hidden_size, config.rms_norm_eps, bias=False)

    def head_norms() -> tuple[nn.Module, nn.Module] | None:
        if not config.use_qk_norm:
            return None
        width, eps = config.head_dim, config.rms_norm_eps
        return HeadNorm(heads, width, eps), HeadNorm(keys, width, eps)

    def layer() -> ParallelLayer:
        attention = Attention(config.hidden_size, config.head_dim, spec, options, head_norms())
        return ParallelLayer(attention, gated_mlp(config), norm())

    layers = [layer() for _ in range(config.num_hidden_layers)]
    return rotary_lm(config, layers, norm(), scaling=Scaling(logits=config.logit_scale))


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    own.only(Keys.Rope.DIMENSION_COUNT, gguf.head_dim(own))
    return {
        **gguf.grouped_config(own, "cohere", "CohereForCausalLM"),
        **gguf.rope(own),
        "layer_norm_eps": own[Keys.Attention.LAYERNORM_EPS],
        "logit_scale": own.get(Keys.LLM.LOGIT_SCALE, 1.0),
        "attention_bias": gguf.attention_biases(own),
        "use_qk_norm": gguf.in_first_layer(own, MODEL_TENSOR.ATTN_Q_NORM),
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={**OUTER, **under("model.layers.{i}", {**LAYER, **QK_NORMS})},
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.COMMAND_R),
        config=_gguf_config,
        rules=gguf.named({**gguf.LAYER, **gguf.QK_NORMS}),
    ),
    tiny={
        "model_type": "cohere",
        "vocab_size": 96,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "logit_scale": 0.0625,
        "use_qk_norm": True,
        "eos_token_id": 0,
    },
    variants={
        "biases, no head norms, untied": {
            "hidden_size": 64,
            "attention_bias": True,
            "use_qk_norm": False,
            "tie_word_embeddings": False,
            "logit_scale": 0.7,
        },
    },
)

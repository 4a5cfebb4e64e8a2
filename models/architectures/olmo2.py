"""OLMo 2: norms behind both branches instead of in front, and of all heads' queries and keys together.

Source: OLMo et al., "2 OLMo 2 Furious" (2025), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import (
    ATTENTION,
    MLP,
    OUTER,
    QK_NORMS,
    gated_mlp,
    rms_norm,
    rotary_lm,
)
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import SandwichLayer
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata

_NORMS = {name: name for name in ("post_attention_layernorm", "post_feedforward_layernorm")}


def _parse_config(reader: ConfigReader) -> RotaryConfig:
    reader.same("num_key_value_heads", "num_attention_heads")
    fields = reader.rotary_fields(biases=False, eps=1e-5, rope=reader.rope(longrope=True))
    bias = reader.get("attention_bias", bool, False)
    reader.finish()
    return RotaryConfig(**fields, attention_bias=bias)


def _build(config: RotaryConfig) -> DecoderLM:
    heads, keys, width = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    spec = AttentionSpec(heads, keys, width**-0.5)
    bias = config.attention_bias
    options = AttentionOptions(qkv_bias=bias, out_bias=bias, norm_all_heads=True)

    def layer() -> SandwichLayer:
        norms = tuple(RMSNorm(count * width, config.rms_norm_eps) for count in (heads, keys))
        return SandwichLayer(
            Attention(config.hidden_size, width, spec, options, (norms[0], norms[1])),
            gated_mlp(config),
            behind=(rms_norm(config), rms_norm(config)),
        )

    layers = [layer() for _ in range(config.num_hidden_layers)]
    return rotary_lm(config, layers, rms_norm(config))


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.rotary_config(own, "olmo2", "Olmo2ForCausalLM")
    return config | {"attention_bias": gguf.attention_biases(own)}


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={**OUTER, **under("model.layers.{i}", {**ATTENTION, **MLP, **QK_NORMS, **_NORMS})},
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.OLMO2),
        config=_gguf_config,
        rules=gguf.named(
            {**gguf.OUTER, **gguf.ATTENTION, **gguf.MLP, **gguf.QK_NORMS, **gguf.BEHIND}
        ),
    ),
    tiny={
        "model_type": "olmo2",
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
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    variants={"biases, tied": {"attention_bias": True, "tie_word_embeddings": True}},
)

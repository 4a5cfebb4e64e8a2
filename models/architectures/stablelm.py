"""StableLM 3B, StableLM 2 and their `model_type` "stablelm": partial rotation, layer norms.

Source: Bellagente et al., "Stable LM 2 1.6B Technical Report" (2024), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys
from torch import nn

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import LAYER, OUTER, gated_mlp, rotary_lm
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer, ParallelLayer
from onnxlm.models.layers.norm import HeadNorm, LayerNorm
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import Rules, Stack, under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class StableLMConfig(RotaryConfig):
    """StableLM's numbers, by Hugging Face key name; `attention_bias` is its `use_qkv_bias`.

    Attributes:
        partial_rotary_factor: Share of a head's widths that turn.
        qk_layernorm: Queries and keys have norms with a weight vector for each head.
        use_parallel_residual: Attention and feed-forward block stand side by side behind one norm.
    """

    partial_rotary_factor: float
    qk_layernorm: bool
    use_parallel_residual: bool


def _parse_config(reader: ConfigReader) -> StableLMConfig:
    reader.unused("hidden_dropout")
    share = reader.rotary_share(0.25)
    eps = reader.get("layer_norm_eps", float, 1e-5)
    rope = reader.rope(longrope=True)
    fields = reader.rotary_fields(eps=eps, biases=False, positions=4096, rope=rope)
    config = StableLMConfig(
        **fields,
        attention_bias=reader.get("use_qkv_bias", bool, False),
        partial_rotary_factor=share,
        qk_layernorm=reader.get("qk_layernorm", bool, False),
        use_parallel_residual=reader.get("use_parallel_residual", bool, False),
    )
    reader.finish()
    return config


def _build(config: StableLMConfig) -> DecoderLM:
    heads, keys, eps = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.rms_norm_eps,
    )
    spec = AttentionSpec(heads, keys, config.head_dim**-0.5)
    options = AttentionOptions(qkv_bias=config.attention_bias)

    def norm() -> LayerNorm:
        return LayerNorm(config.hidden_size, eps)

    def head_norms() -> tuple[nn.Module, nn.Module] | None:
        if not config.qk_layernorm:
            return None
        return HeadNorm(heads, config.head_dim, eps), HeadNorm(keys, config.head_dim, eps)

    def layer() -> nn.Module:
        attention = Attention(config.hidden_size, config.head_dim, spec, options, head_norms())
        if config.use_parallel_residual:
            return ParallelLayer(attention, gated_mlp(config), norm())
        return DecoderLayer(attention, gated_mlp(config), norm(), norm())

    layers = [layer() for _ in range(config.num_hidden_layers)]
    width = int(config.head_dim * config.partial_rotary_factor)
    return rotary_lm(config, layers, norm(), rotary_width=width)


_ATTENTION = "layers.{i}.self_attn."
_RULES: Rules = {
    **OUTER,
    "model.norm.bias": "norm.bias",
    **under("model.layers.{i}", LAYER),
    **{
        f"model.{_ATTENTION}{part}_layernorm.norms.{{e}}.weight": Stack(
            f"{_ATTENTION}{part}_norm.weight"
        )
        for part in "qk"
    },
}


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    return {
        **gguf.grouped_config(own, "stablelm", "StableLmForCausalLM"),
        **gguf.rope(own),
        "partial_rotary_factor": gguf.rotary_share(own),
        "layer_norm_eps": own[Keys.Attention.LAYERNORM_EPS],
        "use_qkv_bias": gguf.attention_biases(own),
        "qk_layernorm": gguf.in_first_layer(own, MODEL_TENSOR.ATTN_Q_NORM),
        "use_parallel_residual": own.get(Keys.LLM.USE_PARALLEL_RESIDUAL, False),
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=_RULES,
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.STABLELM),
        config=_gguf_config,
        rules=gguf.named({**gguf.LAYER, **gguf.QK_NORMS}),
    ),
    tiny={
        "model_type": "stablelm",
        "vocab_size": 96,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_qkv_bias": True,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    variants={
        "a quarter turns, head norms, parallel, tied": {
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            "use_qkv_bias": False,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "tie_word_embeddings": True,
        },
    },
)

"""Phi-1, Phi-1.5, Phi-2: checkpoints of `model_type` "phi".

Source: Li et al., "Textbooks Are All You Need II: phi-1.5 technical report" (2023), section 2.1, and
Microsoft's published code: attention and feed-forward block side by side behind one norm, biases everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, Keys

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._classic import (
    ClassicConfig,
    classic_fields,
    layer_norm,
    plain_mlp,
)
from onnxlm.models.architectures._common import OUTER, embedding_and_head
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import ParallelLayer
from onnxlm.models.layers.norm import LayerNorm
from onnxlm.models.layers.rotary import RopeConfig, rope_tables
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class PhiConfig(ClassicConfig):
    """Phi's numbers.

    Attributes:
        rotary_width: Widths of a head that turn.
        qk_layernorm: Queries and keys are normed, each head by itself.
    """

    rope: RopeConfig
    rotary_width: int
    qk_layernorm: bool


def _parse_config(reader: ConfigReader) -> PhiConfig:
    reader.unused("resid_pdrop", "embd_pdrop")
    fields = classic_fields(reader, act="gelu_new", tied=False, fourfold=False)
    reader.same("num_key_value_heads", "num_attention_heads")
    fields["num_key_value_heads"] = reader.positive("num_key_value_heads")
    reader.divides("num_key_value_heads", "num_attention_heads")
    share = reader.rotary_share(0.5)
    config = PhiConfig(
        **fields,
        rope=reader.rope(),
        rotary_width=int(fields["hidden_size"] // fields["num_attention_heads"] * share),
        qk_layernorm=reader.get("qk_layernorm", bool, False),
    )
    reader.finish()
    return config


def _build(config: PhiConfig) -> DecoderLM:
    spec = AttentionSpec(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim**-0.5
    )
    options = AttentionOptions(qkv_bias=True, out_bias=True)

    def head_norm() -> LayerNorm:
        return LayerNorm(config.head_dim, config.layer_norm_eps)

    def layer() -> ParallelLayer:
        norms = (head_norm(), head_norm()) if config.qk_layernorm else None
        return ParallelLayer(
            Attention(config.hidden_size, config.head_dim, spec, options, norms),
            plain_mlp(config),
            layer_norm(config),
        )

    embedding, head = embedding_and_head(config, head_bias=True)
    tables = rope_tables(config.rope, config.rotary_width, config.max_position_embeddings)
    return DecoderLM(
        embedding,
        [layer() for _ in range(config.num_hidden_layers)],
        layer_norm(config),
        head,
        Positions(rope={"default": tables}),
    )


_MODULES = {
    **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "self_attn.dense": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    "input_layernorm": "input_layernorm",
}


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    width = own[Keys.LLM.EMBEDDING_LENGTH] // own[Keys.Attention.HEAD_COUNT]
    return {
        **gguf.base_config(own, "phi", "PhiForCausalLM"),
        **gguf.rope(own),
        "num_key_value_heads": gguf.kv_heads(own),
        "partial_rotary_factor": own.get(Keys.Rope.DIMENSION_COUNT, width) / width,
        "layer_norm_eps": own[Keys.Attention.LAYERNORM_EPS],
        "hidden_act": "gelu_new",
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        **OUTER,
        "model.final_layernorm.weight": "norm.weight",
        "model.final_layernorm.bias": "norm.bias",
        "lm_head.bias": "lm_head.bias",
        **under("model.layers.{i}", _MODULES),
    },
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.PHI2),
        config=_gguf_config,
        rules={**gguf.named(gguf.LAYER), **gguf.packed_qkv()},
    ),
    tiny={
        "model_type": "phi",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "qk_layernorm": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    variants={
        "grouped, normed queries and keys, tied": {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 4.0,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.4,
            },
        },
    },
)

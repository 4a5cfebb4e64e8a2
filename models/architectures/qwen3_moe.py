"""Qwen3-30B-A3B and Qwen3-235B-A22B: Qwen3's layers with many small experts and none that is shared.

Source: Yang et al., "Qwen3 Technical Report" (2025), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH
from torch import nn

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import LAYER, OUTER, QK_NORMS, rms_norm, rotary_lm
from onnxlm.models.architectures._mixture import UNUSED, expert_counts, expert_rules, sparse_layers
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.mlp import GatedMLP
from onnxlm.models.layers.moe import Experts, SoftmaxRouter, SparseMLP
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(RotaryConfig):
    """Numbers of the experts, by Hugging Face key name.

    Attributes:
        sparse: Whether each layer has experts.
        sliding_window: Of every layer; 0 for none.
    """

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_intermediate_size: int
    sparse: tuple[bool, ...]
    sliding_window: int


def _parse_config(reader: ConfigReader) -> Qwen3MoeConfig:
    reader.spelled({"num_experts": "num_local_experts"})
    reader.unused(*UNUSED, "max_window_layers")
    reader.only("hidden_act", "silu")
    reader.only("use_qk_norm", True)
    fields = reader.rotary_fields(biases=False, positions=32768)
    used = reader.get("use_sliding_window", bool, False)
    window = reader.optional("sliding_window", int, 4096)
    experts, taken = expert_counts(reader, "num_experts", 128, 8)
    config = Qwen3MoeConfig(
        **fields,
        attention_bias=reader.get("attention_bias", bool, False),
        num_experts=experts,
        num_experts_per_tok=taken,
        norm_topk_prob=reader.get("norm_topk_prob", bool, False),
        moe_intermediate_size=reader.positive("moe_intermediate_size", 768),
        sparse=sparse_layers(reader, fields["num_hidden_layers"]),
        sliding_window=(window or 0) if used else 0,
    )
    reader.finish()
    return config


def _build(config: Qwen3MoeConfig) -> DecoderLM:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    spec = AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        scale=config.head_dim**-0.5,
        sliding_window=config.sliding_window,
    )
    options = AttentionOptions(qkv_bias=config.attention_bias, out_bias=config.attention_bias)

    def mlp(sparse: bool) -> nn.Module:
        if not sparse:
            return GatedMLP(hidden, config.intermediate_size)
        count, top_k = config.num_experts, config.num_experts_per_tok
        return SparseMLP(
            SoftmaxRouter(hidden, count, top_k, normalize=config.norm_topk_prob),
            Experts(hidden, config.moe_intermediate_size, count),
        )

    def layer(sparse: bool) -> DecoderLayer:
        norms = (RMSNorm(config.head_dim, eps), RMSNorm(config.head_dim, eps))
        return DecoderLayer(
            Attention(hidden, config.head_dim, spec, options, norms),
            mlp(sparse),
            rms_norm(config),
            rms_norm(config),
        )

    return rotary_lm(config, [layer(sparse) for sparse in config.sparse], rms_norm(config))


_PREFIX = "model.layers.{i}"


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    return {
        **gguf.rotary_config(own, "qwen3_moe", "Qwen3MoeForCausalLM"),
        **gguf.expert_config(own),
        "norm_topk_prob": True,
        "attention_bias": gguf.attention_biases(own),
        "use_sliding_window": False,
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        **OUTER,
        **under(_PREFIX, {**LAYER, **QK_NORMS}),
        f"{_PREFIX}.mlp.gate.weight": "layers.{i}.mlp.router.gate.weight",
        **expert_rules(f"{_PREFIX}.mlp.experts"),
    },
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.QWEN3MOE),
        config=_gguf_config,
        rules={
            **gguf.named({**gguf.OUTER, **gguf.ATTENTION, **gguf.NORMS, **gguf.QK_NORMS}),
            **gguf.expert_rules(),
        },
    ),
    tiny={
        "model_type": "qwen3_moe",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "hidden_act": "silu",
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    variants={
        "dense first layer, window, biases, not normalized": {
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
    },
)

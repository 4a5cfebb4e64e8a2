"""Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B: small experts beside one that every token runs, behind a gate.

Source: Yang et al., "Qwen2 Technical Report" (2024), section 2.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys
from torch import nn

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import LAYER, OUTER, PROJECTIONS, rms_norm, rotary_lm
from onnxlm.models.architectures._mixture import UNUSED, expert_counts, expert_rules, sparse_layers
from onnxlm.models.architectures._windows import WindowedConfig, sliding_windows
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.mlp import GatedMLP
from onnxlm.models.layers.moe import Experts, SoftmaxRouter, SparseMLP
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import Cut, under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(WindowedConfig):
    """Numbers of the experts, by Hugging Face key name.

    Attributes:
        sparse: Whether each layer has experts.
    """

    qkv_bias: bool
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    sparse: tuple[bool, ...]


def _parse_config(reader: ConfigReader) -> Qwen2MoeConfig:
    reader.spelled({"num_experts": "num_local_experts"})
    reader.unused(*UNUSED)
    reader.only("hidden_act", "silu")
    fields = reader.rotary_fields(biases=False, positions=32768)
    experts, taken = expert_counts(reader, "num_experts", 60, 4)
    config = Qwen2MoeConfig(
        **fields,
        qkv_bias=reader.get("qkv_bias", bool, True),
        num_experts=experts,
        num_experts_per_tok=taken,
        norm_topk_prob=reader.get("norm_topk_prob", bool, False),
        moe_intermediate_size=reader.positive("moe_intermediate_size", 1408),
        shared_expert_intermediate_size=reader.positive("shared_expert_intermediate_size", 5632),
        sparse=sparse_layers(reader, fields["num_hidden_layers"]),
        sliding_windows=_windows(reader, fields["num_hidden_layers"]),
    )
    reader.finish()
    return config


def _windows(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Every second layer below `max_window_layers` has the window, where there is one at all."""
    used = reader.get("use_sliding_window", bool, False)
    given, below = (
        reader.optional("sliding_window", int, 4096),
        reader.get("max_window_layers", int, 28),
    )
    return sliding_windows(
        reader,
        layers,
        given if used else None,
        lambda index: used and index % 2 == 0 and index < below,
    )


def _build(config: Qwen2MoeConfig) -> DecoderLM:
    hidden = config.hidden_size

    def attention(window: int) -> Attention:
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            scale=config.head_dim**-0.5,
            sliding_window=window,
        )
        options = AttentionOptions(qkv_bias=config.qkv_bias)
        return Attention(hidden, config.head_dim, spec, options)

    def mlp(sparse: bool) -> nn.Module:
        if not sparse:
            return GatedMLP(hidden, config.intermediate_size)
        count, top_k = config.num_experts, config.num_experts_per_tok
        return SparseMLP(
            SoftmaxRouter(hidden, count, top_k, normalize=config.norm_topk_prob),
            Experts(hidden, config.moe_intermediate_size, count),
            GatedMLP(hidden, config.shared_expert_intermediate_size),
            nn.Linear(hidden, 1, bias=False),
        )

    layers = [
        DecoderLayer(attention(window), mlp(sparse), rms_norm(config), rms_norm(config))
        for window, sparse in zip(config.sliding_windows, config.sparse, strict=True)
    ]
    return rotary_lm(config, layers, rms_norm(config))


_PREFIX = "model.layers.{i}"
_SHARED = {f"mlp.shared_expert.{name}": f"mlp.shared_expert.{name}" for name in PROJECTIONS}


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.rotary_config(own, "qwen2_moe", "Qwen2MoeForCausalLM")
    return {
        **config,
        **gguf.expert_config(own),
        "shared_expert_intermediate_size": own.get(
            Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, config["intermediate_size"]
        ),
        "norm_topk_prob": False,
        "qkv_bias": gguf.attention_biases(own),
        "use_sliding_window": False,
    }


_GGUF_GATE = Cut(
    ("layers.{i}.mlp.shared_expert_gate.weight",), lambda stored, config: (stored.reshape(1, -1),)
)


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        **OUTER,
        **under(_PREFIX, {**LAYER, **_SHARED, "mlp.shared_expert_gate": "mlp.shared_expert_gate"}),
        f"{_PREFIX}.mlp.gate.weight": "layers.{i}.mlp.router.gate.weight",
        **expert_rules(f"{_PREFIX}.mlp.experts"),
    },
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.QWEN2MOE),
        config=_gguf_config,
        rules={
            **gguf.named({**gguf.OUTER, **gguf.ATTENTION, **gguf.NORMS, **gguf.SHARED_EXPERT}),
            gguf.stored_name(MODEL_TENSOR.FFN_GATE_INP_SHEXP): _GGUF_GATE,
            **gguf.expert_rules(),
        },
    ),
    tiny={
        "model_type": "qwen2_moe",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    variants={
        "dense layers, window, normalized, no biases": {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    },
)

"""Mixtral 8x7B, 8x22B: Mistral's layers with eight experts, two of which run for a token.

Source: Jiang et al., "Mixtral of Experts" (2024), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, Keys

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import ATTENTION, NORMS, OUTER, rms_norm, rotary_lm
from onnxlm.models.architectures._mixture import UNUSED, expert_counts, expert_rules
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.moe import Experts, SoftmaxRouter, SparseMLP
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(RotaryConfig):
    """Mixtral's own numbers, by Hugging Face key name.

    Attributes:
        sliding_window: Of every layer; 0 for none.
    """

    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int


def _parse_config(reader: ConfigReader) -> MixtralConfig:
    reader.spelled({"num_local_experts": "num_experts"})
    reader.unused(*UNUSED)
    reader.only("hidden_act", "silu")
    experts, taken = expert_counts(reader, "num_local_experts", 8, 2)
    config = MixtralConfig(
        **reader.rotary_fields(eps=1e-5, theta=1000000.0, biases=False, positions=131072),
        num_local_experts=experts,
        num_experts_per_tok=taken,
        sliding_window=reader.optional("sliding_window", int) or 0,
    )
    reader.finish()
    return config


def _build(config: MixtralConfig) -> DecoderLM:
    hidden = config.hidden_size
    spec = AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        scale=config.head_dim**-0.5,
        sliding_window=config.sliding_window,
    )

    def layer() -> DecoderLayer:
        count, top_k = config.num_local_experts, config.num_experts_per_tok
        return DecoderLayer(
            Attention(hidden, config.head_dim, spec),
            SparseMLP(
                SoftmaxRouter(hidden, count, top_k, normalize=True),
                Experts(hidden, config.intermediate_size, count),
            ),
            rms_norm(config),
            rms_norm(config),
        )

    return rotary_lm(config, [layer() for _ in range(config.num_hidden_layers)], rms_norm(config))


_PREFIX = "model.layers.{i}"
_BLOCK = f"{_PREFIX}.block_sparse_moe"


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    return {
        **gguf.rotary_config(own, "mixtral", "MixtralForCausalLM"),
        "num_local_experts": own[Keys.LLM.EXPERT_COUNT],
        "num_experts_per_tok": own[Keys.LLM.EXPERT_USED_COUNT],
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        **OUTER,
        **under(_PREFIX, {**ATTENTION, **NORMS}),
        f"{_PREFIX}.mlp.gate.weight": "layers.{i}.mlp.router.gate.weight",
        f"{_BLOCK}.gate.weight": "layers.{i}.mlp.router.gate.weight",
        **expert_rules(f"{_PREFIX}.mlp.experts"),
        **expert_rules(f"{_BLOCK}.experts", ("w1", "w3", "w2")),
    },
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.LLAMA),
        config=_gguf_config,
        rules={
            **gguf.named({**gguf.OUTER, **gguf.ATTENTION, **gguf.NORMS}),
            **gguf.expert_rules(),
        },
        permuted=gguf.PERMUTED,
        applies=lambda own: bool(own.get(Keys.LLM.EXPERT_COUNT, 0)),
    ),
    tiny={
        "model_type": "mixtral",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    variants={
        "window, tied, one of five experts": {
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
        },
    },
)

"""gpt-oss-20b and -120b: attention sinks, a window in every second layer, experts with a clamped activation.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import ATTENTION, NORMS, OUTER, rms_norm, rotary_lm
from onnxlm.models.architectures._mixture import UNUSED, expert_counts
from onnxlm.models.architectures._windows import WindowedConfig, sliding_windows
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.experts import GateSpec
from onnxlm.models.layers.moe import Experts, SoftmaxRouter, SparseMLP
from onnxlm.models.layers.rotary import RopeConfig
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import Cut, under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata

_ROPE: Mapping[str, Any] = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(WindowedConfig):
    """gpt-oss's own numbers, by Hugging Face key name."""

    num_local_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float
    swiglu_limit: float


def _parse_config(reader: ConfigReader) -> GptOssConfig:
    reader.spelled({"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"})
    reader.unused(*UNUSED, "initial_context_length")
    reader.only("hidden_act", "silu")
    _check_method(reader.mapping("quantization_config"))
    rope = reader.rope(150000.0)
    if not (reader.raw("rope_parameters") or reader.raw("rope_scaling")):
        rope = RopeConfig("yarn", rope.rope_theta, _ROPE)
    fields = reader.rotary_fields(eps=1e-5, biases=False, positions=131072, head_dim=64, rope=rope)
    window = reader.optional("sliding_window", int, 128)
    windows = sliding_windows(
        reader, fields["num_hidden_layers"], window, lambda index: index % 2 == 0
    )
    experts, taken = expert_counts(reader, "num_local_experts", 128, 4)
    config = GptOssConfig(
        **fields,
        attention_bias=reader.get("attention_bias", bool, True),
        num_local_experts=experts,
        num_experts_per_tok=taken,
        swiglu_alpha=reader.get("swiglu_alpha", float, 1.702),
        swiglu_limit=reader.get("swiglu_limit", float, 7.0),
        sliding_windows=windows,
    )
    reader.finish()
    return config


def _check_method(raw: Mapping[str, Any]) -> None:
    """Which matrices are in MXFP4 their tensors tell; in another form there may be none."""
    reader = ConfigReader(raw, "quantization_config")
    reader.only("quant_method", "mxfp4")
    reader.unused("modules_to_not_convert")
    reader.finish()


def _build(config: GptOssConfig) -> DecoderLM:
    hidden = config.hidden_size
    gate = GateSpec(alpha=config.swiglu_alpha, shift=1.0, limit=config.swiglu_limit)
    biases = config.attention_bias
    options = AttentionOptions(qkv_bias=biases, out_bias=biases, sinks=True)

    def layer(window: int) -> DecoderLayer:
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            scale=config.head_dim**-0.5,
            sliding_window=window,
        )
        count, top_k = config.num_local_experts, config.num_experts_per_tok
        return DecoderLayer(
            Attention(hidden, config.head_dim, spec, options),
            SparseMLP(
                SoftmaxRouter(hidden, count, top_k, normalize=True, bias=True),
                Experts(hidden, config.intermediate_size, count, gate, bias=True),
            ),
            rms_norm(config),
            rms_norm(config),
        )

    return rotary_lm(config, [layer(window) for window in config.sliding_windows], rms_norm(config))


def _turned(name: str) -> Cut:
    """Experts' matrices stored as [E, inputs, outputs]."""
    return Cut((name,), lambda stored, config: (stored.transpose(1, 2),))


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.rotary_config(own, "gpt_oss", "GptOssForCausalLM")
    # A config that says nothing of it would have positions scaled as published.
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        # What has no key in GGUF is as published; llama.cpp rounds the ends of the ramp instead.
        scaling["truncate"] = _ROPE["truncate"]
    wide = config["intermediate_size"]
    return {
        **config,
        "rope_scaling": scaling,
        "intermediate_size": own.get(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, wide),
        "attention_bias": gguf.attention_biases(own),
        "num_local_experts": own[Keys.LLM.EXPERT_COUNT],
        "num_experts_per_tok": own[Keys.LLM.EXPERT_USED_COUNT],
        "sliding_window": own[Keys.Attention.SLIDING_WINDOW],
        "layer_types": gguf.window_layers(own, 2),
    }


_GGUF_NORMS = {
    MODEL_TENSOR.ATTN_NORM: "input_layernorm",
    MODEL_TENSOR.ATTN_POST_NORM: "post_attention_layernorm",
}
_PREFIX = "model.layers.{i}"
_STORED, _OWN = f"{_PREFIX}.mlp.experts", "layers.{i}.mlp.experts"

ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        **OUTER,
        **under(_PREFIX, {**ATTENTION, **NORMS, "mlp.router": "mlp.router.gate"}),
        f"{_PREFIX}.self_attn.sinks": "layers.{i}.self_attn.sinks",
        # Gate and up lie in turns here too. Blocks of MXFP4 are [E, outputs, inputs], other weights turned.
        f"{_STORED}.gate_up_proj": _turned(f"{_OWN}.gate_up"),
        f"{_STORED}.down_proj": _turned(f"{_OWN}.down"),
        f"{_STORED}.gate_up_proj_blocks": f"{_OWN}.gate_up",
        f"{_STORED}.down_proj_blocks": f"{_OWN}.down",
        f"{_STORED}.gate_up_proj_bias": f"{_OWN}.gate_up_bias",
        f"{_STORED}.down_proj_bias": f"{_OWN}.down_bias",
    },
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.GPT_OSS),
        config=_gguf_config,
        rules={
            **gguf.named({**gguf.OUTER, **gguf.ATTENTION, **_GGUF_NORMS}),
            gguf.stored_name(MODEL_TENSOR.ATTN_SINKS): "layers.{i}.self_attn.sinks",
            **gguf.expert_rules(),
            **gguf.expert_biases(),
        },
    ),
    tiny={
        "model_type": "gpt_oss",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            **_ROPE,
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "original_max_position_embeddings": 16,
        },
        "hidden_act": "silu",
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    variants={
        "tied, plain projections, low limit": {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "swiglu_alpha": 1.0,
            "swiglu_limit": 1.5,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
)

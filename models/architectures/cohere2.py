"""Command R7B and Command A: Command R whose layers turn within a window, and every fourth sees all unturned.

Source: Cohere, "Command A: An Enterprise-Ready Large Language Model" (2025), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, Keys

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import LAYER, OUTER, gated_mlp, rotary_lm
from onnxlm.models.architectures._windows import WindowedConfig, sliding_windows
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Scaling
from onnxlm.models.layers.decoder_layers import ParallelLayer
from onnxlm.models.layers.norm import LayerNorm
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(WindowedConfig):
    """Cohere 2's numbers, by Hugging Face key name.

    Attributes:
        logit_scale: Factor of the logits.
    """

    logit_scale: float


def _parse_config(reader: ConfigReader) -> Cohere2Config:
    reader.unused("cache_implementation")  # how transformers' own generation keeps its cache
    # Names of what is the only form there is; the first of the layers' order is a remark on `layer_types`.
    reader.only("use_gated_activation", True)
    reader.only("use_parallel_block", True)
    reader.unused("use_parallel_embedding")  # how a table was spread over devices
    reader.unused("use_embedding_sharing")  # `tie_word_embeddings` decides
    reader.same("num_key_value_heads", "num_attention_heads")
    reader.only("use_qk_norm", False)
    reader.only("rotary_pct", 1.0)
    reader.only("position_embedding_type", "rope_gptj")
    reader.only("layer_switch", None, 4)
    reader.only("order_of_interleaved_layers", None, "local_attn_first")
    eps = reader.get("layer_norm_eps", float, 1e-5)
    fields = reader.rotary_fields(
        tied=True, eps=eps, biases=False, positions=8192, rope=reader.rope(longrope=True)
    )
    pattern = reader.positive("sliding_window_pattern", 4)
    reader.unused("_sliding_window_pattern")
    config = Cohere2Config(
        **fields,
        attention_bias=reader.get("attention_bias", bool, False),
        logit_scale=reader.get("logit_scale", float, 0.0625),
        sliding_windows=sliding_windows(
            reader,
            fields["num_hidden_layers"],
            reader.optional("sliding_window", int, 4096),
            lambda index: (index + 1) % pattern != 0,
        ),
    )
    reader.finish()
    return config


def _build(config: Cohere2Config) -> DecoderLM:
    def norm() -> LayerNorm:
        return LayerNorm(config.hidden_size, config.rms_norm_eps, bias=False)

    def layer(window: int) -> ParallelLayer:
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            scale=config.head_dim**-0.5,
            sliding_window=window,
            interleaved=True,
        )
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            rope="default" if window else None,
        )
        attention = Attention(config.hidden_size, config.head_dim, spec, options)
        return ParallelLayer(attention, gated_mlp(config), norm())

    layers = [layer(window) for window in config.sliding_windows]
    return rotary_lm(config, layers, norm(), scaling=Scaling(logits=config.logit_scale))


_NAMES = {name: new for name, new in LAYER.items() if name != "post_attention_layernorm"}


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    own.only(Keys.Rope.DIMENSION_COUNT, gguf.head_dim(own))
    return {
        **gguf.grouped_config(own, "cohere2", "Cohere2ForCausalLM"),
        **gguf.rope(own),
        "layer_norm_eps": own[Keys.Attention.LAYERNORM_EPS],
        "logit_scale": own[Keys.LLM.LOGIT_SCALE],
        "attention_bias": gguf.attention_biases(own),
        "sliding_window": own[Keys.Attention.SLIDING_WINDOW],
        "layer_types": gguf.window_layers(own, 4),
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={**OUTER, **under("model.layers.{i}", _NAMES)},
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.COHERE2),
        config=_gguf_config,
        rules=gguf.named(gguf.LAYER),
    ),
    tiny={
        "model_type": "cohere2",
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
        "attention_bias": True,
        "logit_scale": 0.25,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "eos_token_id": 0,
    },
)

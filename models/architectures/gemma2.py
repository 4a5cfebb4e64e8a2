"""Gemma 2: norms around both branches, soft-capped scores and logits, every second layer with a window.

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size" (2024), section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, Keys

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import gated_mlp, rms_norm, rotary_lm
from onnxlm.models.architectures._gemma import (
    GELU,
    SANDWICH,
    GemmaConfig,
    gemma_fields,
    gemma_options,
    gemma_rules,
    gemma_scaling,
    gemma_spec,
    gguf_gemma_config,
)
from onnxlm.models.architectures._windows import sliding_windows
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import SandwichLayer
from onnxlm.models.registry import Architecture, GgufFamily

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


def _parse_config(reader: ConfigReader) -> GemmaConfig:
    # `hidden_activation` decides; both of the others only repeat what another key says.
    reader.unused("hidden_act", "sliding_window_size")
    fields = gemma_fields(reader, positions=8192, rope=reader.rope(longrope=True))
    fields["hidden_act"] = reader.activation("hidden_activation", GELU)
    config = GemmaConfig(
        **fields,
        query_pre_attn_scalar=reader.positive_float("query_pre_attn_scalar", 256.0),
        attn_logit_softcapping=reader.optional("attn_logit_softcapping", float, 50.0),
        final_logit_softcapping=reader.optional("final_logit_softcapping", float, 30.0),
        sliding_windows=sliding_windows(
            reader,
            fields["num_hidden_layers"],
            reader.optional("sliding_window", int, 4096),
            lambda index: index % 2 == 0,
        ),
    )
    reader.finish()
    return config


def _build(config: GemmaConfig) -> DecoderLM:
    def layer(window: int) -> SandwichLayer:
        spec, options = gemma_spec(config, window), gemma_options(config)
        return SandwichLayer(
            Attention(config.hidden_size, config.head_dim, spec, options),
            gated_mlp(config),
            behind=(rms_norm(config), rms_norm(config)),
            before=(rms_norm(config), rms_norm(config)),
        )

    layers = [layer(window) for window in config.sliding_windows]
    return rotary_lm(config, layers, rms_norm(config), scaling=gemma_scaling(config))


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    own.only(Keys.Rope.SCALING_TYPE, "none")
    config = gguf.rotary_config(own, "gemma2", "Gemma2ForCausalLM")
    return config | {
        **gguf_gemma_config(own, config, layers_27b=46),
        "attn_logit_softcapping": own.get(Keys.LLM.ATTN_LOGIT_SOFTCAPPING, 50.0),
        "final_logit_softcapping": own.get(Keys.LLM.FINAL_LOGIT_SOFTCAPPING, 30.0),
        "sliding_window": own.get(Keys.Attention.SLIDING_WINDOW, 4096),
        "layer_types": gguf.window_layers(own, 2),
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=gemma_rules(SANDWICH),
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.GEMMA2),
        config=_gguf_config,
        rules=gguf.named({**gguf.OUTER, **gguf.ATTENTION, **gguf.MLP, **gguf.SANDWICH}),
    ),
    tiny={
        "model_type": "gemma2",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 5.0,
        "sliding_window": 6,
    },
    variants={
        "biases, full first, no caps": {
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    },
)

"""Gemma 3, text: five layers with a window and their own rotary base, then one that sees everything.

Source: Gemma Team, "Gemma 3 Technical Report" (2025), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, Keys

from onnxlm.errors import ConfigError
from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import embedding_and_head, gated_mlp, rms_norm
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
from onnxlm.models.architectures._windows import FULL, SLIDING, sliding_windows
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import SandwichLayer
from onnxlm.models.layers.norm import RMSNorm
from onnxlm.models.layers.rotary import RopeConfig, rope_tables
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.rope_reading import read_rope

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata

_SOURCE = "config.json"
_NAMES = {FULL: "default", SLIDING: "local"}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Numbers of Gemma 3; `rope` are the settings of layers without a window.

    Attributes:
        local_rope: Those of layers with one.
    """

    local_rope: RopeConfig


def _ropes(reader: ConfigReader) -> dict[str, RopeConfig]:
    """Rotary settings by type of layer: nested by type, or in the older form two bases and one scaling."""
    bases = {
        FULL: reader.get("rope_theta", float, 1_000_000.0),
        SLIDING: reader.get("rope_local_base_freq", float, 10_000.0),
    }
    given = reader.mapping("rope_parameters")
    scaling = reader.mapping("rope_scaling")
    unknown = sorted(given.keys() - bases.keys())
    if unknown:
        raise ConfigError(
            f"{_SOURCE}: field 'rope_parameters' of this family is nested by type of layer",
            found=", ".join(unknown),
            allowed=f"{FULL}, {SLIDING}",
        )
    ropes = {}
    for kind, base in bases.items():
        own: Mapping[str, Any] = given.get(kind) or {}
        if kind == FULL:
            own = {**own, **scaling}
        ropes[kind] = read_rope(own, base, _SOURCE)
        if ropes[kind].rope_type == "longrope":
            raise ConfigError(f"{_SOURCE}: this family has no rope_type 'longrope'")
    return ropes


def _parse_config(reader: ConfigReader) -> Gemma3Config:
    reader.unused("hidden_act")  # `hidden_activation` decides
    reader.only("attn_logit_softcapping", None)
    ropes = _ropes(reader)
    fields = gemma_fields(reader, positions=131072, rope=ropes[FULL])
    fields["hidden_act"] = reader.activation("hidden_activation", GELU)
    reader.unused("_sliding_window_pattern")  # what transformers made `layer_types` from
    pattern = reader.positive("sliding_window_pattern", 6)
    config = Gemma3Config(
        **fields,
        local_rope=ropes[SLIDING],
        query_pre_attn_scalar=reader.positive_float("query_pre_attn_scalar", 256.0),
        attn_logit_softcapping=None,
        final_logit_softcapping=reader.optional("final_logit_softcapping", float),
        sliding_windows=sliding_windows(
            reader,
            fields["num_hidden_layers"],
            reader.optional("sliding_window", int, 4096),
            lambda index: (index + 1) % pattern != 0,
        ),
    )
    reader.finish()
    return config


def _build(config: Gemma3Config) -> DecoderLM:
    def head_norm() -> RMSNorm:
        return RMSNorm(config.head_dim, config.rms_norm_eps)

    def layer(window: int) -> SandwichLayer:
        options = gemma_options(config, _NAMES[SLIDING if window else FULL])
        spec, norms = gemma_spec(config, window), (head_norm(), head_norm())
        return SandwichLayer(
            Attention(config.hidden_size, config.head_dim, spec, options, norms),
            gated_mlp(config),
            behind=(rms_norm(config), rms_norm(config)),
            before=(rms_norm(config), rms_norm(config)),
        )

    embedding, head = embedding_and_head(config)
    width, positions = config.head_dim, config.max_position_embeddings
    tables = {
        _NAMES[FULL]: rope_tables(config.rope, width, positions),
        _NAMES[SLIDING]: rope_tables(config.local_rope, width, positions),
    }
    layers = [layer(window) for window in config.sliding_windows]
    return DecoderLM(
        embedding,
        layers,
        rms_norm(config),
        head,
        Positions(rope=tables),
        scaling=gemma_scaling(config),
    )


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.rotary_config(own, "gemma3_text", "Gemma3ForCausalLM")
    window = own.get(Keys.Attention.SLIDING_WINDOW, 0)
    scaling = config.pop("rope_scaling", {})
    ropes = {
        FULL: {"rope_theta": config.pop("rope_theta"), **scaling},
        SLIDING: {"rope_theta": own.get(Keys.Rope.FREQ_BASE_SWA, 10_000.0)},
    }
    return config | {
        **gguf_gemma_config(own, config, layers_27b=62),
        "rope_parameters": {name: {"rope_type": "default", **rope} for name, rope in ropes.items()},
        "final_logit_softcapping": own.get(Keys.LLM.FINAL_LOGIT_SOFTCAPPING),
        "sliding_window": window,
        "layer_types": gguf.window_layers(own, 6 if window else 1),
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=gemma_rules((*SANDWICH, "self_attn.q_norm", "self_attn.k_norm")),
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.GEMMA3),
        config=_gguf_config,
        rules=gguf.named(
            {**gguf.OUTER, **gguf.ATTENTION, **gguf.MLP, **gguf.SANDWICH, **gguf.QK_NORMS}
        ),
    ),
    tiny={
        "model_type": "gemma3_text",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    variants={
        "biases, capped logits, full first": {
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    },
)

"""Phi-3 and Phi-4: Llama with packed projections, a window, partial rotation and LongRoPE.

Source: Abdin et al., "Phi-3 Technical Report" (2024), section 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys
from torch import Tensor

from onnxlm.errors import ConfigError
from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._common import NORMS, OUTER, gated_mlp, rms_norm, rotary_lm
from onnxlm.models.config import ConfigReader, RotaryConfig
from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.rotary import RopeConfig
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import Cut, Rules, under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class Phi3Config(RotaryConfig):
    """Phi-3's numbers, by Hugging Face key name.

    Attributes:
        sliding_window: Of every layer; 0 for none.
        partial_rotary_factor: Share of a head's widths that turn.
    """

    sliding_window: int
    partial_rotary_factor: float


def _rope(reader: ConfigReader) -> RopeConfig:
    rope = reader.rope(longrope=True)
    original = reader.positive("original_max_position_embeddings", 4096)
    if rope.rope_type not in ("default", "longrope"):
        raise ConfigError(
            "rope_type is not supported for phi3",
            found=rope.rope_type,
            allowed="default, longrope",
        )
    if rope.rope_type == "default":
        return rope
    # The key beside the rotary settings has the last word in this family.
    parameters = {**rope.parameters, "original_max_position_embeddings": original}
    return dataclasses.replace(rope, parameters=parameters)


def _parse_config(reader: ConfigReader) -> Phi3Config:
    reader.unused("embd_pdrop", "resid_pdrop")
    reader.only("full_attn_mod", 1)  # every so many layers see all
    reader.only("interpolate_factor", 1)
    reader.same("num_key_value_heads", "num_attention_heads")
    share = reader.rotary_share(1.0)
    fields = reader.rotary_fields(biases=False, eps=1e-5, positions=4096, rope=_rope(reader))
    config = Phi3Config(
        **fields,
        sliding_window=reader.optional("sliding_window", int) or 0,
        partial_rotary_factor=share,
    )
    reader.finish()
    return config


def _build(config: Phi3Config) -> DecoderLM:
    spec = AttentionSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        scale=config.head_dim**-0.5,
        sliding_window=config.sliding_window,
    )

    def layer() -> DecoderLayer:
        return DecoderLayer(
            Attention(config.hidden_size, config.head_dim, spec),
            gated_mlp(config),
            rms_norm(config),
            rms_norm(config),
        )

    layers = [layer() for _ in range(config.num_hidden_layers)]
    width = int(config.head_dim * config.partial_rotary_factor)
    return rotary_lm(config, layers, rms_norm(config), rotary_width=width)


def _cut_qkv(stored: Tensor, config: Phi3Config) -> Sequence[Tensor]:
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return torch.split(stored, [queries, keys, keys])


_LAYER = "layers.{i}."
_RULES: Rules = {
    **OUTER,
    **under("model.layers.{i}", {**NORMS, "self_attn.o_proj": "self_attn.o_proj"}),
    **under("model.layers.{i}", {"mlp.down_proj": "mlp.down_proj"}),
    f"model.{_LAYER}self_attn.qkv_proj.weight": Cut(
        tuple(f"{_LAYER}self_attn.{part}_proj.weight" for part in "qkv"), _cut_qkv
    ),
    f"model.{_LAYER}mlp.gate_up_proj.weight": Cut(
        (f"{_LAYER}mlp.gate_proj.weight", f"{_LAYER}mlp.up_proj.weight"),
        lambda stored, config: stored.chunk(2),
    ),
}


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.grouped_config(own, "phi3", "Phi3ForCausalLM")
    original = own.get(Keys.Rope.SCALING_ORIG_CTX_LEN, config["max_position_embeddings"])
    return config | {
        **gguf.rope(own),
        "rms_norm_eps": own[Keys.Attention.LAYERNORM_RMS_EPS],
        "original_max_position_embeddings": original,
        "partial_rotary_factor": gguf.rotary_share(own),
        "sliding_window": own.get(Keys.Attention.SLIDING_WINDOW) or None,
    }


_GATE_UP = Cut(
    (f"{_LAYER}mlp.gate_proj.weight", f"{_LAYER}mlp.up_proj.weight"),
    lambda stored, config: stored.chunk(2),
    rows=True,
)


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=_RULES,
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.PHI3),
        config=_gguf_config,
        rules={
            **gguf.named(gguf.LAYER),
            **gguf.packed_qkv(),
            gguf.stored_name(MODEL_TENSOR.FFN_UP): _GATE_UP,
        },
    ),
    tiny={
        "model_type": "phi3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "partial_rotary_factor": 1.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": 7,
        "pad_token_id": 0,
        "eos_token_id": 0,
    },
    variants={
        # Rows of tests are shorter than the switch; both sides of it: tests/parity/test_longrope.py.
        "half of each head turns, longrope, tied": {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8],
                "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0],
            },
        },
    },
)

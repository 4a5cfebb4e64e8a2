"""GPT-2 and every checkpoint of `model_type` "gpt2" (DistilGPT-2, DialoGPT, Cerebras-GPT, ...).

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys
from torch import Tensor

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._classic import (
    ATTENTION_BUFFERS,
    GPT2_KEYS,
    GPT2_UNUSED,
    QKV,
    ClassicConfig,
    classic_fields,
    layer_norm,
    plain_mlp,
)
from onnxlm.models.architectures._common import embedding_and_head
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.position_embedding import LearnedPositions
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import Cut, Rule, Rules, transposed

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(ClassicConfig):
    """GPT-2's numbers.

    Attributes:
        scale_attn_weights: Scores are divided by the root of the head's width.
        scale_attn_by_inverse_layer_idx: And by the number of the layer, from 1 on.
    """

    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool


def _parse_config(reader: ConfigReader) -> Gpt2Config:
    reader.spelled(GPT2_KEYS)
    reader.unused(*GPT2_UNUSED)
    reader.unused("reorder_and_upcast_attn")  # the same product in another order
    reader.only("add_cross_attention", False)
    config = Gpt2Config(
        **classic_fields(reader, act="gelu_new", tied=True, positions=1024),
        scale_attn_weights=reader.get("scale_attn_weights", bool, True),
        scale_attn_by_inverse_layer_idx=reader.get("scale_attn_by_inverse_layer_idx", bool, False),
    )
    reader.finish()
    return config


def _scale(config: Gpt2Config, index: int) -> float:
    scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
    return scale / (index + 1) if config.scale_attn_by_inverse_layer_idx else scale


def _build(config: Gpt2Config) -> DecoderLM:
    heads, width = config.num_attention_heads, config.hidden_size
    options = AttentionOptions(qkv_bias=True, out_bias=True, rope=None)

    def layer(index: int) -> DecoderLayer:
        spec = AttentionSpec(heads, heads, _scale(config, index))
        return DecoderLayer(
            Attention(width, config.head_dim, spec, options),
            plain_mlp(config),
            layer_norm(config),
            layer_norm(config),
        )

    embedding, head = embedding_and_head(config)
    return DecoderLM(
        embedding,
        [layer(index) for index in range(config.num_hidden_layers)],
        layer_norm(config),
        head,
        positions=Positions(learned=LearnedPositions(config.max_position_embeddings, width)),
    )


def _cut_columns(stored: Tensor, config: Gpt2Config) -> Sequence[Tensor]:
    """[C, 3 C], as the layer multiplies from the left -> three of [C, C]."""
    return stored.T.chunk(3)


def _layer(prefix: str) -> Rules:
    """Products are stored as [inputs, outputs]."""
    rules: dict[str, Rule] = {f"{prefix}.attn.{name}": None for name in ATTENTION_BUFFERS}
    rules[f"{prefix}.attn.c_attn.weight"] = Cut(tuple(f"{n}.weight" for n in QKV), _cut_columns)
    rules[f"{prefix}.attn.c_attn.bias"] = Cut(
        tuple(f"{name}.bias" for name in QKV), lambda stored, config: stored.chunk(3)
    )
    products = {
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    for old, new in products.items():
        rules[f"{prefix}.{old}.weight"] = transposed(f"layers.{{i}}.{new}.weight")
        rules[f"{prefix}.{old}.bias"] = f"layers.{{i}}.{new}.bias"
    for old, new in (("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm")):
        for part in ("weight", "bias"):
            rules[f"{prefix}.{old}.{part}"] = f"layers.{{i}}.{new}.{part}"
    return rules


_RULES: Rules = {
    "transformer.wte.weight": "embed_tokens.weight",
    "transformer.wpe.weight": "embed_positions.weight",
    "transformer.ln_f.weight": "norm.weight",
    "transformer.ln_f.bias": "norm.bias",
    "lm_head.weight": "lm_head.weight",
    **_layer("transformer.h.{i}"),
}


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.base_config(own, "gpt2", "GPT2LMHeadModel")
    spelled = {GPT2_KEYS.get(key, key): value for key, value in config.items()}
    return spelled | {
        GPT2_KEYS["layer_norm_eps"]: own[Keys.Attention.LAYERNORM_EPS],
        GPT2_KEYS["hidden_act"]: "gelu_new",
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=_RULES,
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.GPT2),
        config=_gguf_config,
        # Products are stored as [outputs, inputs] here.
        rules={
            **gguf.named({**gguf.LAYER, MODEL_TENSOR.POS_EMBD: "embed_positions"}),
            **gguf.packed_qkv(),
        },
    ),
    tiny={
        "model_type": "gpt2",
        "vocab_size": 96,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "n_embd": 64,
        "n_inner": None,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
    },
    variants={
        "untied, wide inside, scale by layer": {
            "tie_word_embeddings": False,
            "n_inner": 96,
            "activation_function": "gelu",
            "scale_attn_by_inverse_layer_idx": True,
            "layer_norm_epsilon": 1e-3,
        },
    },
)

"""Falcon and every checkpoint of `model_type` "falcon" (7B, 40B, 180B, 11B, RW).

Source: Almazrouei et al., "The Falcon Series of Open Language Models" (2023), section 4, and its published
code. Three layouts of attention: one key-value head (7B), groups (40B and later), one for each query
head (RW).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys
from torch import Tensor

from onnxlm.errors import ConfigError
from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._classic import (
    ATTENTION_BUFFERS,
    ClassicConfig,
    classic_fields,
    layer_norm,
    packed_by_group,
    plain_mlp,
)
from onnxlm.models.architectures._common import NORMS, embedding_and_head
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import DecoderLayer, ParallelLayer
from onnxlm.models.layers.distance_bias import alibi_slopes
from onnxlm.models.layers.rotary import RopeConfig, rope_tables
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import Either, under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata

_KEYS = {
    "intermediate_size": "ffn_hidden_size",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation",
}


@dataclass(frozen=True, kw_only=True)
class FalconConfig(ClassicConfig):
    """Falcon's numbers.

    Attributes:
        rope: Rotary settings; None with ALiBi.
        bias: Products have biases.
        parallel_attn: Attention and feed-forward block read the same residual.
        norms: In front of attention and feed-forward block, one for both or one each.
    """

    rope: RopeConfig | None
    bias: bool
    parallel_attn: bool
    norms: int


def _parse_config(reader: ConfigReader) -> FalconConfig:
    reader.spelled(_KEYS)
    reader.unused("hidden_dropout")
    reader.only("apply_residual_connection_post_layernorm", False)
    grouped = reader.get("new_decoder_architecture", bool, False)
    parallel = reader.get("parallel_attn", bool, True)
    if grouped and not parallel:
        raise ConfigError(
            "field 'parallel_attn' is not supported with this value",
            found="False with new_decoder_architecture",
            allowed="True",
        )
    fields = classic_fields(reader, act="gelu", tied=True)
    reader.only("ff_factor", fields["intermediate_size"] / fields["hidden_size"])
    fields["num_key_value_heads"] = _kv_heads(reader, grouped, fields["num_attention_heads"])
    rope = reader.rope()  # read with ALiBi too: such configs hold settings that nothing uses
    config = FalconConfig(
        **fields,
        rope=None if reader.get("alibi", bool, False) else rope,
        bias=reader.get("bias", bool, False),
        parallel_attn=parallel,
        norms=_norms(reader, grouped, parallel),
    )
    reader.finish()
    return config


def _kv_heads(reader: ConfigReader, grouped: bool, heads: int) -> int:
    one = reader.get("multi_query", bool, True)
    if grouped:
        reader.positive("num_kv_heads", heads)
        reader.divides("num_kv_heads", "num_attention_heads")
        return reader.positive("num_kv_heads", heads)
    if one:
        reader.unused("num_kv_heads")
        return 1
    reader.only("num_kv_heads", heads)
    return heads


def _norms(reader: ConfigReader, grouped: bool, parallel: bool) -> int:
    if grouped:
        reader.only("num_ln_in_parallel_attn", 2, 1)
        return reader.positive("num_ln_in_parallel_attn", 2)
    if parallel:
        reader.only("num_ln_in_parallel_attn", 1)
        return 1
    reader.unused("num_ln_in_parallel_attn")
    return 2


def _layer(config: FalconConfig) -> DecoderLayer | ParallelLayer:
    spec = AttentionSpec(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim**-0.5
    )
    rope = None if config.rope is None else "default"
    options = AttentionOptions(qkv_bias=config.bias, out_bias=config.bias, rope=rope)
    attention = Attention(config.hidden_size, config.head_dim, spec, options)
    mlp = plain_mlp(config, config.bias)
    if not config.parallel_attn:
        return DecoderLayer(attention, mlp, layer_norm(config), layer_norm(config))
    mlp_norm = layer_norm(config) if config.norms == 2 else None
    return ParallelLayer(attention, mlp, layer_norm(config), mlp_norm)


def _build(config: FalconConfig) -> DecoderLM:
    embedding, head = embedding_and_head(config)
    positions = config.max_position_embeddings
    if config.rope is None:
        places = Positions(bias_table=_alibi(config), bias_from_end=True)
    else:
        places = Positions(rope={"default": rope_tables(config.rope, config.head_dim, positions)})
    return DecoderLM(
        embedding,
        [_layer(config) for _ in range(config.num_hidden_layers)],
        layer_norm(config),
        head,
        places,
    )


def _alibi(config: FalconConfig) -> Tensor:
    """float32 [H, M]: slope times the key's position, M - 1 - column, over the root of the head's width.

    The models were trained with slopes and products in bfloat16, whose roundings do not cancel between two
    positions: a bias by distance would be another model from 256 positions on.
    """
    slopes = alibi_slopes(config.num_attention_heads).float().bfloat16()
    positions = torch.arange(config.max_position_embeddings - 1, -1, -1, device="cpu")
    table: Tensor = (slopes[:, None] * positions).float() * config.head_dim**-0.5
    return table


_PREFIX = "transformer.h.{i}"
_MODULES = {
    **NORMS,
    "ln_attn": "input_layernorm",
    "ln_mlp": "post_attention_layernorm",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    own.only(Keys.LLM.TENSOR_DATA_LAYOUT, "jploski")  # queries, keys and values one behind another
    own.only(Keys.Rope.DIMENSION_COUNT, gguf.head_dim(own))
    config = gguf.base_config(own, "falcon", "FalconForCausalLM")
    grouped = gguf.kv_heads(own) > 1
    return {
        **{_KEYS.get(key, key): value for key, value in config.items()},
        **gguf.rope(own),
        _KEYS["layer_norm_eps"]: own[Keys.Attention.LAYERNORM_EPS],
        _KEYS["hidden_act"]: "gelu",
        "bias": gguf.in_first_layer(own, MODEL_TENSOR.ATTN_QKV, "bias"),
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": grouped,
        "num_kv_heads": gguf.kv_heads(own),
        "num_ln_in_parallel_attn": 2 if gguf.in_first_layer(own, MODEL_TENSOR.ATTN_NORM_2) else 1,
    }


# The norm of the feed-forward block takes the place of the only one where there are two.
_NORMS = {
    f"{gguf.stored_name(MODEL_TENSOR.ATTN_NORM, part)}": Either(
        (f"layers.{{i}}.post_attention_layernorm.{part}", f"layers.{{i}}.input_layernorm.{part}")
    )
    for part in ("weight", "bias")
}


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        "transformer.word_embeddings.weight": "embed_tokens.weight",
        "transformer.ln_f.weight": "norm.weight",
        "transformer.ln_f.bias": "norm.bias",
        "lm_head.weight": "lm_head.weight",
        **under(_PREFIX, _MODULES),
        **packed_by_group(f"{_PREFIX}.self_attention.query_key_value"),
        **{f"{_PREFIX}.self_attention.{name}": None for name in ATTENTION_BUFFERS},
    },
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.FALCON),
        config=_gguf_config,
        rules={
            **gguf.named({**gguf.LAYER, MODEL_TENSOR.ATTN_NORM_2: "input_layernorm"}),
            **_NORMS,
            **gguf.packed_qkv(),
        },
    ),
    tiny={
        "model_type": "falcon",
        "vocab_size": 96,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": None,
        "max_position_embeddings": 128,
        "layer_norm_epsilon": 1e-5,
        "activation": "gelu",
        "alibi": False,
        "bias": False,
        "new_decoder_architecture": True,
        "multi_query": True,
        "parallel_attn": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    },
    variants={
        "one KV head, one norm, biases": {
            "new_decoder_architecture": False,
            "bias": True,
            "tie_word_embeddings": False,
        },
        "all KV heads, in turn, ALiBi": {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
        },
    },
)

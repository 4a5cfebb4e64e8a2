"""BLOOM and every checkpoint of `model_type` "bloom" (BLOOMZ too).

Source: BigScience, "BLOOM" (2022), section 3.2: positions by ALiBi, a norm behind the embedding, GELU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys

from onnxlm.models.architectures import _gguf as gguf
from onnxlm.models.architectures._classic import (
    ATTENTION_BUFFERS,
    GPT2_KEYS,
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
from onnxlm.models.layers.decoder import Bridges, DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.distance_bias import alibi_table
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import Rules, under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata

# `seq_length` is the length of training: ALiBi has no table that would end.
_KEYS = {**GPT2_KEYS, "hidden_size": "n_embed", "max_position_embeddings": "seq_length"}
# Of training, or other ways to the same numbers.
_UNUSED = (
    *("hidden_dropout", "attention_softmax_in_fp32", "bias_dropout_fusion", "offset_alibi"),
    *("masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"),
    "unk_token_id",
)


def _parse_config(reader: ConfigReader) -> ClassicConfig:
    reader.spelled(_KEYS)
    reader.unused(*_UNUSED)
    reader.only("apply_residual_connection_post_layernorm", False)
    reader.only("hidden_act", "gelu_new")
    fields = classic_fields(reader, act="gelu_new", tied=True)
    reader.only("intermediate_size", 4 * fields["hidden_size"])
    config = ClassicConfig(**fields)
    reader.finish()
    return config


def _build(config: ClassicConfig) -> DecoderLM:
    heads = config.num_attention_heads
    spec = AttentionSpec(heads, heads, config.head_dim**-0.5)
    options = AttentionOptions(qkv_bias=True, out_bias=True, rope=None)

    def layer() -> DecoderLayer:
        return DecoderLayer(
            Attention(config.hidden_size, config.head_dim, spec, options),
            plain_mlp(config),
            layer_norm(config),
            layer_norm(config),
        )

    embedding, head = embedding_and_head(config)
    return DecoderLM(
        embedding,
        [layer() for _ in range(config.num_hidden_layers)],
        layer_norm(config),
        head,
        Positions(bias_table=alibi_table(heads, config.max_position_embeddings)),
        bridges=Bridges(embedding_norm=layer_norm(config)),
    )


_MODULES = {
    **NORMS,
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


_LAYER = "transformer.h.{i}"
_RULES: Rules = {
    "transformer.word_embeddings.weight": "embed_tokens.weight",
    "transformer.word_embeddings_layernorm.weight": "embed_norm.weight",
    "transformer.word_embeddings_layernorm.bias": "embed_norm.bias",
    "transformer.ln_f.weight": "norm.weight",
    "transformer.ln_f.bias": "norm.bias",
    "lm_head.weight": "lm_head.weight",
    **under(_LAYER, _MODULES),
    **packed_by_group(f"{_LAYER}.self_attention.query_key_value"),
    **{f"{_LAYER}.self_attention.{name}": None for name in ATTENTION_BUFFERS},
}


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    config = gguf.base_config(own, "bloom", "BloomForCausalLM")
    own.only(Keys.Attention.HEAD_COUNT_KV, own[Keys.Attention.HEAD_COUNT])
    return {
        **{_KEYS.get(key, key): value for key, value in config.items()},
        _KEYS["layer_norm_eps"]: own[Keys.Attention.LAYERNORM_EPS],
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=_RULES,
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.BLOOM),
        config=_gguf_config,
        rules={
            **gguf.named({**gguf.LAYER, MODEL_TENSOR.TOKEN_EMBD_NORM: "embed_norm"}),
            **gguf.packed_qkv(),
        },
    ),
    tiny={
        "model_type": "bloom",
        "vocab_size": 96,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "seq_length": 128,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    },
    variants={
        "six heads, untied": {
            "hidden_size": 96,  # slopes between the powers of two
            "n_head": 6,
            "tie_word_embeddings": False,
        },
    },
)

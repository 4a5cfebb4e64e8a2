"""OPT and every checkpoint of `model_type` "opt" (Galactica too).

Source: Zhang et al., "OPT" (2022), section 2.1, and Meta's published code: learned positions from row 2 of
their table on; the model of 350 million parameters has its norms behind the sums and narrower embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from onnxlm.models.architectures._classic import ClassicConfig, classic_fields, plain_mlp
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention, AttentionOptions
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import Bridges, DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import DecoderLayer, PostNormLayer
from onnxlm.models.layers.norm import LayerNorm
from onnxlm.models.layers.position_embedding import LearnedPositions
from onnxlm.models.registry import Architecture
from onnxlm.models.weight_rules import Either, Rules, under

_POSITION_OFFSET = 2


@dataclass(frozen=True, kw_only=True)
class OptConfig(ClassicConfig):
    """OPT's numbers.

    Attributes:
        word_embed_proj_dim: Width of the embeddings; where it is not that of the layers, two products lead
            there and back.
        do_layer_norm_before: Norms stand in front of their blocks.
        final_norm: There is a norm behind the last layer.
        enable_bias: Products have biases.
        layer_norm_elementwise_affine: Norms have weights.
    """

    word_embed_proj_dim: int
    do_layer_norm_before: bool
    final_norm: bool
    enable_bias: bool
    layer_norm_elementwise_affine: bool


def _parse_config(reader: ConfigReader) -> OptConfig:
    reader.spelled({"intermediate_size": "ffn_dim", "hidden_act": "activation_function"})
    reader.unused("dropout", "layerdrop", "init_std", "activation_dropout", "prefix")
    reader.only("layer_norm_eps", 1e-5)
    reader.only("learned_embeddings", True)
    fields = classic_fields(reader, act="relu", tied=True, fourfold=False)
    before = reader.get("do_layer_norm_before", bool, True)
    config = OptConfig(
        **fields,
        word_embed_proj_dim=reader.positive("word_embed_proj_dim", fields["hidden_size"]),
        do_layer_norm_before=before,
        final_norm=before and not reader.get("_remove_final_layer_norm", bool, False),
        enable_bias=reader.get("enable_bias", bool, True),
        layer_norm_elementwise_affine=reader.get("layer_norm_elementwise_affine", bool, True),
    )
    reader.finish()
    return config


def _norm(config: OptConfig) -> LayerNorm:
    affine = config.layer_norm_elementwise_affine
    return LayerNorm(config.hidden_size, config.layer_norm_eps, bias=affine, weight=affine)


def _layer(config: OptConfig) -> DecoderLayer | PostNormLayer:
    heads, bias = config.num_attention_heads, config.enable_bias
    spec = AttentionSpec(heads, heads, config.head_dim**-0.5)
    options = AttentionOptions(qkv_bias=bias, out_bias=bias, rope=None)
    attention = Attention(config.hidden_size, config.head_dim, spec, options)
    kind = DecoderLayer if config.do_layer_norm_before else PostNormLayer
    return kind(attention, plain_mlp(config, bias), _norm(config), _norm(config))


def _build(config: OptConfig) -> DecoderLM:
    width, narrow = config.hidden_size, config.word_embed_proj_dim
    embedding = nn.Embedding(config.vocab_size, narrow)
    head = nn.Linear(narrow, config.vocab_size, bias=False)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    bridges = Bridges()
    if narrow != width:
        bridges = Bridges(
            project_in=nn.Linear(narrow, width, bias=False),
            project_out=nn.Linear(width, narrow, bias=False),
        )
    return DecoderLM(
        embedding,
        [_layer(config) for _ in range(config.num_hidden_layers)],
        _norm(config) if config.final_norm else None,
        head,
        positions=Positions(
            learned=LearnedPositions(config.max_position_embeddings, width, _POSITION_OFFSET)
        ),
        bridges=bridges,
    )


_PREFIX = "model.decoder."
_MODULES = {
    **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "self_attn.out_proj": "self_attn.o_proj",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}
# In front of a block, or behind its sum.
_NORMS = {
    "self_attn_layer_norm": ("input_layernorm", "attention_norm"),
    "final_layer_norm": ("post_attention_layernorm", "mlp_norm"),
}
_RULES: Rules = {
    f"{_PREFIX}embed_tokens.weight": "embed_tokens.weight",
    f"{_PREFIX}embed_positions.weight": "embed_positions.weight",
    f"{_PREFIX}project_in.weight": "project_in.weight",
    f"{_PREFIX}project_out.weight": "project_out.weight",
    f"{_PREFIX}final_layer_norm.weight": "norm.weight",
    f"{_PREFIX}final_layer_norm.bias": "norm.bias",
    "lm_head.weight": "lm_head.weight",
    **under(f"{_PREFIX}layers.{{i}}", _MODULES),
    **{
        f"{_PREFIX}layers.{{i}}.{old}.{part}": Either(
            tuple(f"layers.{{i}}.{name}.{part}" for name in new)
        )
        for old, new in _NORMS.items()
        for part in ("weight", "bias")
    },
}


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules=_RULES,
    tiny={
        "model_type": "opt",
        "vocab_size": 96,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "activation_function": "relu",
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 64,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    variants={
        "norms behind, narrow embeddings, untied": {
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 32,
            "tie_word_embeddings": False,
        },
        "no biases, plain norms": {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "_remove_final_layer_norm": True,
        },
    },
)

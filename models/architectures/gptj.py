"""GPT-J and every checkpoint of `model_type` "gptj".

Source: Wang and Komatsuzaki, "GPT-J-6B" (2021): attention and feed-forward block side by side behind one
norm; the first `rotary_dim` widths of a head turn, in neighbouring pairs; the head has biases.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxlm.models.architectures._classic import (
    ATTENTION_BUFFERS,
    GPT2_KEYS,
    GPT2_UNUSED,
    ClassicConfig,
    classic_fields,
    layer_norm,
    plain_mlp,
)
from onnxlm.models.architectures._common import embedding_and_head
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM, Positions
from onnxlm.models.layers.decoder_layers import ParallelLayer
from onnxlm.models.layers.rotary import RopeConfig, rope_tables
from onnxlm.models.registry import Architecture
from onnxlm.models.weight_rules import under


@dataclass(frozen=True, kw_only=True)
class GptjConfig(ClassicConfig):
    """GPT-J's numbers.

    Attributes:
        rotary_dim: Widths of a head that turn.
    """

    rotary_dim: int


def _parse_config(reader: ConfigReader) -> GptjConfig:
    reader.spelled(GPT2_KEYS)
    reader.unused(*GPT2_UNUSED, "rotary", "tokenizer_class")
    reader.only("scale_attn_weights", True)
    config = GptjConfig(
        **classic_fields(reader, act="gelu_new", tied=False),
        rotary_dim=reader.positive("rotary_dim", 64),
    )
    reader.finish()
    return config


def _build(config: GptjConfig) -> DecoderLM:
    heads = config.num_attention_heads
    spec = AttentionSpec(heads, heads, config.head_dim**-0.5, interleaved=True)

    def layer() -> ParallelLayer:
        attention = Attention(config.hidden_size, config.head_dim, spec)
        return ParallelLayer(attention, plain_mlp(config), layer_norm(config))

    embedding, head = embedding_and_head(config, head_bias=True)
    tables = rope_tables(RopeConfig(), config.rotary_dim, config.max_position_embeddings)
    return DecoderLM(
        embedding,
        [layer() for _ in range(config.num_hidden_layers)],
        layer_norm(config),
        head,
        Positions(rope={"default": tables}),
    )


_PREFIX = "transformer.h.{i}"
_MODULES = {
    **{f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "attn.out_proj": "self_attn.o_proj",
    "mlp.fc_in": "mlp.up_proj",
    "mlp.fc_out": "mlp.down_proj",
    "ln_1": "input_layernorm",
}

ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        "transformer.wte.weight": "embed_tokens.weight",
        "transformer.ln_f.weight": "norm.weight",
        "transformer.ln_f.bias": "norm.bias",
        "lm_head.weight": "lm_head.weight",
        "lm_head.bias": "lm_head.bias",
        **under(_PREFIX, _MODULES),
        **{f"{_PREFIX}.attn.{name}": None for name in ATTENTION_BUFFERS},
    },
    tiny={
        "model_type": "gptj",
        "vocab_size": 96,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "n_embd": 64,
        "n_inner": None,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 128,
        "rotary_dim": 16,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    variants={
        "tied, few widths turn": {
            "tie_word_embeddings": True,
            "n_head": 4,
            "rotary_dim": 4,
            "n_inner": 96,
        },
    },
)

"""GPT-NeoX and every checkpoint of `model_type` "gpt_neox" (Pythia, Dolly 2, RedPajama, ...).

Source: Black et al., "GPT-NeoX-20B" (2022), section 2: attention and feed-forward block side by side, each
with a norm of its own; a part of each head's widths turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf.constants import MODEL_ARCH, MODEL_TENSOR, Keys

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
from onnxlm.models.layers.rotary import RopeConfig, rope_tables
from onnxlm.models.registry import Architecture, GgufFamily
from onnxlm.models.weight_rules import under

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata


@dataclass(frozen=True, kw_only=True)
class NeoxConfig(ClassicConfig):
    """GPT-NeoX's numbers.

    Attributes:
        rotary_width: Widths of a head that turn.
        use_parallel_residual: Attention and feed-forward block read the same residual.
    """

    rope: RopeConfig
    rotary_width: int
    attention_bias: bool
    use_parallel_residual: bool


def _parse_config(reader: ConfigReader) -> NeoxConfig:
    reader.spelled({"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"})
    reader.unused("hidden_dropout", "classifier_dropout")
    fields = classic_fields(reader, act="gelu", tied=False, fourfold=False)
    share = reader.rotary_share(0.25)
    config = NeoxConfig(
        **fields,
        rope=reader.rope(),
        rotary_width=int(fields["hidden_size"] // fields["num_attention_heads"] * share),
        attention_bias=reader.get("attention_bias", bool, True),
        use_parallel_residual=reader.get("use_parallel_residual", bool, True),
    )
    reader.finish()
    return config


def _build(config: NeoxConfig) -> DecoderLM:
    heads, bias = config.num_attention_heads, config.attention_bias
    spec = AttentionSpec(heads, heads, config.head_dim**-0.5)
    kind = ParallelLayer if config.use_parallel_residual else DecoderLayer

    def layer() -> DecoderLayer | ParallelLayer:
        options = AttentionOptions(qkv_bias=bias, out_bias=bias)
        return kind(
            Attention(config.hidden_size, config.head_dim, spec, options),
            plain_mlp(config),
            layer_norm(config),
            layer_norm(config),
        )

    embedding, head = embedding_and_head(config)
    tables = rope_tables(config.rope, config.rotary_width, config.max_position_embeddings)
    return DecoderLM(
        embedding,
        [layer() for _ in range(config.num_hidden_layers)],
        layer_norm(config),
        head,
        Positions(rope={"default": tables}),
    )


_PREFIX = "gpt_neox.layers.{i}"
_MODULES = {
    **NORMS,
    "attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


def _gguf_config(own: FamilyMetadata) -> dict[str, Any]:
    width = own[Keys.LLM.EMBEDDING_LENGTH] // own[Keys.Attention.HEAD_COUNT]
    return {
        **gguf.base_config(own, "gpt_neox", "GPTNeoXForCausalLM"),
        **gguf.rope(own),
        "rotary_pct": own[Keys.Rope.DIMENSION_COUNT] / width,
        "layer_norm_eps": own[Keys.Attention.LAYERNORM_EPS],
        "hidden_act": "gelu",
        "attention_bias": gguf.in_first_layer(own, MODEL_TENSOR.ATTN_QKV, "bias"),
        "use_parallel_residual": own.get(Keys.LLM.USE_PARALLEL_RESIDUAL, True),
    }


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        "gpt_neox.embed_in.weight": "embed_tokens.weight",
        "gpt_neox.final_layer_norm.weight": "norm.weight",
        "gpt_neox.final_layer_norm.bias": "norm.bias",
        "embed_out.weight": "lm_head.weight",
        **under(_PREFIX, _MODULES),
        **packed_by_group(f"{_PREFIX}.attention.query_key_value"),
        **{f"{_PREFIX}.attention.{name}": None for name in ATTENTION_BUFFERS},
    },
    gguf=GgufFamily(
        architecture=gguf.arch_name(MODEL_ARCH.GPTNEOX),
        config=_gguf_config,
        rules={**gguf.named(gguf.LAYER), **gguf.packed_qkv()},
    ),
    tiny={
        "model_type": "gpt_neox",
        "vocab_size": 96,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_act": "gelu",
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    variants={
        "in turn, plain attention, four widths turn, linear": {
            "use_parallel_residual": False,
            "attention_bias": False,
            "num_attention_heads": 4,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 4.0,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            },
        },
    },
)

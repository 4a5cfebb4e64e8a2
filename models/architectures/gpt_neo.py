"""GPT-Neo and every checkpoint of `model_type` "gpt_neo" (TinyStories too).

Source: Black et al., "GPT-Neo" (2021), published code: GPT-2 whose scores are not scaled and whose layers see
all tokens and a window in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxlm.errors import ConfigError
from onnxlm.models.architectures._classic import (
    ATTENTION_BUFFERS,
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
from onnxlm.models.registry import Architecture
from onnxlm.models.weight_rules import under

_GLOBAL, _LOCAL = "global", "local"


@dataclass(frozen=True, kw_only=True)
class GptNeoConfig(ClassicConfig):
    """GPT-Neo's numbers.

    Attributes:
        attention_layers: "global" or "local", for each layer.
        window_size: Tokens that a local layer sees, a token itself included.
    """

    attention_layers: tuple[str, ...]
    window_size: int


_KEYS = {
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
_UNUSED = (
    *("attention_layers", "resid_dropout", "embed_dropout", "classifier_dropout"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "gradient_checkpointing", "tokenizer_class", "task_specific_params"),
)


def _parse_config(reader: ConfigReader) -> GptNeoConfig:
    reader.spelled(_KEYS)
    reader.unused(*_UNUSED)
    fields = classic_fields(reader, act="gelu_new", tied=True)
    kinds = _expanded(reader.raw("attention_types") or [[[_GLOBAL, _LOCAL], 12]])
    if len(kinds) != fields["num_hidden_layers"] or not set(kinds) <= {_GLOBAL, _LOCAL}:
        raise ConfigError(
            "field 'attention_types' does not give each layer its kind",
            found=f"{len(kinds)} layers of {sorted(set(kinds))}",
            allowed=f"{fields['num_hidden_layers']} layers of 'global', 'local'",
        )
    config = GptNeoConfig(
        **fields,
        attention_layers=kinds,
        window_size=reader.positive("window_size", 256),
    )
    reader.finish()
    return config


def _expanded(types: Any) -> tuple[str, ...]:
    """[[kinds, times], ...] -> a kind a layer."""
    try:
        return tuple(str(kind) for kinds, times in types for _ in range(times) for kind in kinds)
    except (TypeError, ValueError):
        raise ConfigError(
            "field 'attention_types'", found=repr(types), allowed='as in [[["global", "local"], 6]]'
        ) from None


def _build(config: GptNeoConfig) -> DecoderLM:
    heads, width = config.num_attention_heads, config.hidden_size
    options = AttentionOptions(out_bias=True, rope=None)

    def layer(kind: str) -> DecoderLayer:
        window = config.window_size if kind == _LOCAL else 0
        return DecoderLayer(
            Attention(width, config.head_dim, AttentionSpec(heads, heads, 1.0, window), options),
            plain_mlp(config),
            layer_norm(config),
            layer_norm(config),
        )

    embedding, head = embedding_and_head(config)
    return DecoderLM(
        embedding,
        [layer(kind) for kind in config.attention_layers],
        layer_norm(config),
        head,
        positions=Positions(learned=LearnedPositions(config.max_position_embeddings, width)),
    )


_PREFIX = "transformer.h.{i}"
_MODULES = {
    **{f"attn.attention.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "attn.attention.out_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
}

ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=_build,
    rules={
        "transformer.wte.weight": "embed_tokens.weight",
        "transformer.wpe.weight": "embed_positions.weight",
        "transformer.ln_f.weight": "norm.weight",
        "transformer.ln_f.bias": "norm.bias",
        "lm_head.weight": "lm_head.weight",
        **under(_PREFIX, _MODULES),
        **{f"{_PREFIX}.attn.attention.{name}": None for name in ATTENTION_BUFFERS},
    },
    tiny={
        "model_type": "gpt_neo",
        "vocab_size": 96,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_size": 64,
        "intermediate_size": None,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": 128,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
)

"""How families lie in GGUF files: names of tensors and keys of metadata are those of the `gguf` package.

What the metadata leaves out is what llama.cpp takes for granted: see its `conversion/` (how files are
written) and `src/models/` (how they are read).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSOR, TENSOR_NAMES, Keys
from torch import Tensor

from onnxlm.models.architectures._mixture import alternating
from onnxlm.models.weight_rules import Cut, Rules, Stack

if TYPE_CHECKING:
    from onnxlm.models.checkpoint.gguf_metadata import FamilyMetadata

_LAYER = "layers.{i}."

# GGUF's tensors -> this project's modules; those of a layer without "layers.{i}.".
OUTER: Mapping[MODEL_TENSOR, str] = {
    MODEL_TENSOR.TOKEN_EMBD: "embed_tokens",
    MODEL_TENSOR.OUTPUT_NORM: "norm",
    MODEL_TENSOR.OUTPUT: "lm_head",
}
ATTENTION: Mapping[MODEL_TENSOR, str] = {
    MODEL_TENSOR.ATTN_Q: "self_attn.q_proj",
    MODEL_TENSOR.ATTN_K: "self_attn.k_proj",
    MODEL_TENSOR.ATTN_V: "self_attn.v_proj",
    MODEL_TENSOR.ATTN_OUT: "self_attn.o_proj",
}
PLAIN_MLP: Mapping[MODEL_TENSOR, str] = {
    MODEL_TENSOR.FFN_UP: "mlp.up_proj",
    MODEL_TENSOR.FFN_DOWN: "mlp.down_proj",
}
MLP: Mapping[MODEL_TENSOR, str] = {MODEL_TENSOR.FFN_GATE: "mlp.gate_proj", **PLAIN_MLP}
NORMS: Mapping[MODEL_TENSOR, str] = {
    MODEL_TENSOR.ATTN_NORM: "input_layernorm",
    MODEL_TENSOR.FFN_NORM: "post_attention_layernorm",
}
LAYER: Mapping[MODEL_TENSOR, str] = {**OUTER, **ATTENTION, **MLP, **NORMS}
QK_NORMS: Mapping[MODEL_TENSOR, str] = {
    MODEL_TENSOR.ATTN_Q_NORM: "self_attn.q_norm",
    MODEL_TENSOR.ATTN_K_NORM: "self_attn.k_norm",
}
BEHIND: Mapping[MODEL_TENSOR, str] = {
    MODEL_TENSOR.ATTN_POST_NORM: "post_attention_layernorm",
    MODEL_TENSOR.FFN_POST_NORM: "post_feedforward_layernorm",
}
# Norms in front of both branches and behind them.
SANDWICH: Mapping[MODEL_TENSOR, str] = {
    MODEL_TENSOR.ATTN_NORM: "input_layernorm",
    MODEL_TENSOR.FFN_PRE_NORM: "pre_feedforward_layernorm",
    **BEHIND,
}
ROUTER: Mapping[MODEL_TENSOR, str] = {MODEL_TENSOR.FFN_GATE_INP: "mlp.router.gate"}
SHARED_EXPERT: Mapping[MODEL_TENSOR, str] = {
    MODEL_TENSOR.FFN_GATE_SHEXP: "mlp.shared_expert.gate_proj",
    MODEL_TENSOR.FFN_UP_SHEXP: "mlp.shared_expert.up_proj",
    MODEL_TENSOR.FFN_DOWN_SHEXP: "mlp.shared_expert.down_proj",
}

_PACKED = tuple(f"{_LAYER}self_attn.{part}_proj" for part in "qkv")
_GATE_UP, _DOWN = f"{_LAYER}mlp.experts.gate_up", f"{_LAYER}mlp.experts.down"


def arch_name(architecture: MODEL_ARCH) -> str:
    """The `general.architecture` of a family's files."""
    return MODEL_ARCH_NAMES[architecture]


def stored_name(tensor: MODEL_TENSOR, part: str = "weight") -> str:
    """A tensor's name in a file, with "{i}" for the layer's number."""
    return f"{TENSOR_NAMES[tensor].replace('{bid}', '{i}')}.{part}"


def in_first_layer(own: FamilyMetadata, tensor: MODEL_TENSOR, part: str = "weight") -> bool:
    """Whether the layers of a file have this tensor."""
    return own.has(stored_name(tensor, part).replace("{i}", "0"))


def named(modules: Mapping[MODEL_TENSOR, str]) -> Rules:
    """Rules for weights and biases of modules, see `OUTER`."""
    rules = {}
    for tensor, module in modules.items():
        for part in ("weight", "bias"):
            name = stored_name(tensor, part)
            rules[name] = f"{_LAYER if '{i}' in name else ''}{module}.{part}"
    return rules


# Rows of queries and keys that are stored in the other rotary order.
PERMUTED: Mapping[str, str] = {
    stored_name(tensor, part): heads
    for tensor, heads in (
        (MODEL_TENSOR.ATTN_Q, "num_attention_heads"),
        (MODEL_TENSOR.ATTN_K, "num_key_value_heads"),
    )
    for part in ("weight", "bias")
}


def packed_qkv() -> Rules:
    """Rules for Q, K and V in one tensor, all queries in front of all keys in front of all values."""
    return {
        stored_name(MODEL_TENSOR.ATTN_QKV, part): Cut(
            tuple(f"{name}.{part}" for name in _PACKED), _cut_qkv, rows=True
        )
        for part in ("weight", "bias")
    }


def _cut_qkv(stored: Tensor, config: Any) -> Sequence[Tensor]:
    """[(H + 2 Hkv) * D, ...] -> [H * D, ...], and [Hkv * D, ...] twice."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return torch.split(stored, [queries, keys, keys])


def expert_rules() -> Rules:
    """Rules for the router, and for experts whose gate, up and down matrices lie in a tensor each.

    An option of the converter puts the rows of all gates and ups in one tensor.
    """
    both = Cut((_GATE_UP,), lambda stored, config: (alternating(stored),))
    return {
        **named(ROUTER),
        **_expert_parts("weight"),
        stored_name(MODEL_TENSOR.FFN_GATE_UP_EXP): both,
    }


def expert_biases() -> Rules:
    """Rules for what is added to the experts' products, where they have biases."""
    return _expert_parts("bias")


def _expert_parts(part: str) -> Rules:
    def each(tensor: MODEL_TENSOR) -> str:
        return stored_name(tensor, f"{{e}}.{part}")

    end = "" if part == "weight" else f"_{part}"
    return {
        each(MODEL_TENSOR.FFN_GATE_EXP): Stack(_GATE_UP + end, 0, 2),
        each(MODEL_TENSOR.FFN_UP_EXP): Stack(_GATE_UP + end, 1, 2),
        each(MODEL_TENSOR.FFN_DOWN_EXP): Stack(_DOWN + end),
    }


def head_dim(own: FamilyMetadata) -> int:
    """Width of a head, of its values too."""
    width: int = own.get(
        Keys.Attention.KEY_LENGTH, own[Keys.LLM.EMBEDDING_LENGTH] // own[Keys.Attention.HEAD_COUNT]
    )
    own.only(Keys.Attention.VALUE_LENGTH, width)
    return width


def kv_heads(own: FamilyMetadata) -> int:
    """Number of key-value heads."""
    count: int = own.get(Keys.Attention.HEAD_COUNT_KV, own[Keys.Attention.HEAD_COUNT])
    return count


def base_config(own: FamilyMetadata, model_type: str, causal_lm: str) -> dict[str, Any]:
    """What every family has, by Hugging Face's usual keys.

    Args:
        own: The metadata.
        model_type: Hugging Face's name of the family.
        causal_lm: Hugging Face's class of its language models.
    """
    rows = own.rows(stored_name(MODEL_TENSOR.TOKEN_EMBD))
    return {
        "model_type": model_type,
        "architectures": [causal_lm],
        "vocab_size": own.get(Keys.LLM.VOCAB_SIZE, rows),
        "hidden_size": own[Keys.LLM.EMBEDDING_LENGTH],
        "intermediate_size": own[Keys.LLM.FEED_FORWARD_LENGTH],
        "num_hidden_layers": own[Keys.LLM.BLOCK_COUNT],
        "num_attention_heads": own[Keys.Attention.HEAD_COUNT],
        "max_position_embeddings": own[Keys.LLM.CONTEXT_LENGTH],
    }


def rotary_config(own: FamilyMetadata, model_type: str, causal_lm: str) -> dict[str, Any]:
    """`base_config` and what families since Llama have besides; heads turn whole."""
    own.only(Keys.Rope.DIMENSION_COUNT, head_dim(own))
    return {
        **grouped_config(own, model_type, causal_lm),
        "rms_norm_eps": own[Keys.Attention.LAYERNORM_RMS_EPS],
        **rope(own),
    }


def grouped_config(own: FamilyMetadata, model_type: str, causal_lm: str) -> dict[str, Any]:
    """`base_config` of families with key-value heads and a gated feed-forward block."""
    return {
        **base_config(own, model_type, causal_lm),
        "num_key_value_heads": kv_heads(own),
        "head_dim": head_dim(own),
        "hidden_act": "silu",
    }


def expert_config(own: FamilyMetadata) -> dict[str, Any]:
    """Experts of Qwen's mixtures, which every layer has."""
    used, wide = own[Keys.LLM.EXPERT_USED_COUNT], own[Keys.LLM.FEED_FORWARD_LENGTH]
    return {
        "num_experts": own[Keys.LLM.EXPERT_COUNT],
        "num_experts_per_tok": used,
        "moe_intermediate_size": own.get(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, wide // used),
        "decoder_sparse_step": 1,
    }


def rotary_share(own: FamilyMetadata) -> float:
    """`partial_rotary_factor`: which share of a head turns."""
    width = head_dim(own)
    share: float = own.get(Keys.Rope.DIMENSION_COUNT, width) / width
    return share


def attention_biases(own: FamilyMetadata) -> bool:
    """Whether queries, keys and values have biases."""
    return in_first_layer(own, MODEL_TENSOR.ATTN_Q, "bias")


def rope(own: FamilyMetadata) -> dict[str, Any]:
    """`rope_theta` and, where positions are scaled, `rope_scaling`."""
    own.get(Keys.Rope.SCALING_FINETUNED)  # a remark on how the model was made
    settings: dict[str, Any] = {"rope_theta": own.get(Keys.Rope.FREQ_BASE, 10000.0)}
    scaling = _divisors(own) or _scaling(own)
    if scaling is not None:
        settings["rope_scaling"] = scaling
    return settings


def _divisors(own: FamilyMetadata) -> dict[str, Any] | None:
    """Frequencies that a tensor divides: Llama 3.1's for all rows, LongRoPE's for short and for long ones."""
    every = own.vector(stored_name(MODEL_TENSOR.ROPE_FREQS))
    if every is not None:
        own.only(Keys.Rope.SCALING_TYPE, "none")
        # Hugging Face's way to say so: LongRoPE whose two sets are one.
        return {
            "rope_type": "longrope",
            "short_factor": every,
            "long_factor": every,
            "attention_factor": 1.0,
            "original_max_position_embeddings": own[Keys.LLM.CONTEXT_LENGTH],
        }
    short = own.vector(stored_name(MODEL_TENSOR.ROPE_FACTORS_SHORT))
    long = own.vector(stored_name(MODEL_TENSOR.ROPE_FACTORS_LONG))
    if short is None or long is None:
        return None
    own.only(Keys.Rope.SCALING_TYPE, "longrope")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": own.get(Keys.Rope.SCALING_ATTN_FACTOR),
        "original_max_position_embeddings": own[Keys.Rope.SCALING_ORIG_CTX_LEN],
    }


def _scaling(own: FamilyMetadata) -> dict[str, Any] | None:
    """Scaling that numbers say."""
    kind = own.get(Keys.Rope.SCALING_TYPE, "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": own[Keys.Rope.SCALING_FACTOR]}
    if kind == "yarn":
        # What both would multiply is not the same here and there.
        own.only(Keys.Rope.SCALING_YARN_ATTN_FACTOR, 1.0)
        own.only(Keys.Rope.SCALING_YARN_EXT_FACTOR, 1.0)
    further = {
        "original_max_position_embeddings": Keys.Rope.SCALING_ORIG_CTX_LEN,
        "beta_fast": Keys.Rope.SCALING_YARN_BETA_FAST,
        "beta_slow": Keys.Rope.SCALING_YARN_BETA_SLOW,
    }
    given = {name: own.get(key) for name, key in further.items()}
    return scaling | {name: value for name, value in given.items() if value is not None}


def window_layers(own: FamilyMetadata, period: int) -> list[str]:
    """`layer_types`: which layers have a window; without a pattern in the file, all but every `period`-th.

    The pattern is a period, or a truth value for each layer.
    """
    pattern = own.get(Keys.Attention.SLIDING_WINDOW_PATTERN, period)
    layers = range(own[Keys.LLM.BLOCK_COUNT])
    if isinstance(pattern, int):
        slides = [(index + 1) % pattern != 0 for index in layers]
    else:
        slides = [bool(flag) for flag in pattern]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]

"""What llama.cpp's converter does with tensors and numbers (`conversion/`), told by Hugging Face's names.

A form is (name, values, config) -> the tensors that one becomes in a file, by Hugging Face's way of naming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gguf.constants import Keys
from numpy.typing import NDArray

Array = NDArray[np.float32]
Form = Callable[[str, Array, Any], Mapping[str, Array]]


def interleave(rows: Array, heads: int) -> Array:
    """Halves of each head's rows in turns: row r and row r + D/2 become neighbours."""
    width = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, width, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def interleaved(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    if ".q_proj." in name:
        return {name: interleave(array, config.num_attention_heads)}
    if ".k_proj." in name:
        return {name: interleave(array, config.num_key_value_heads)}
    return experts(name, array, config)


def raised(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    return {name: array + 1 if name.endswith("norm.weight") else array}


def turned(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    products = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {name: array.T if name.endswith(products) else array}


def regrouped(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    """Q, K and V of each head in turn -> all of Q, all of K, all of V."""
    if (
        config.model_type == "bloom"
    ):  # is converted as its checkpoints are, without the outer module
        name = name.removeprefix("transformer.")
    if "query_key_value" not in name:
        return {name: array}
    heads = config.num_attention_heads
    groups = getattr(config, "num_kv_heads", heads)
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        groups = 1
    rest = array.shape[1:]
    parts = array.reshape(groups, heads // groups + 2, config.hidden_size // heads, *rest)
    split = (parts[:, :-2], parts[:, -2], parts[:, -1])
    return {name: np.concatenate([part.reshape(-1, *rest) for part in split])}


def experts(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    """Gate and up matrices of all experts in a tensor each."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        gate, up = np.split(array, 2, axis=1)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if last == "down_proj":
        return {f"{name}.weight": array}
    return {name: array}


def in_turns(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    """gpt-oss: gate and up in turns, matrices as [E, inputs, outputs]."""
    name = name.replace(".sinks", ".sinks.weight").replace("proj_bias", "proj.bias")
    stem, _, last = name.rpartition(".")
    if ".experts." not in name:
        return {name: array}
    if last != "bias":
        stem, last, array = name, "weight", array.swapaxes(1, 2)
    if "gate_up_proj" not in stem:
        return {f"{stem}.{last}": array}
    gate, up = array[:, 0::2], array[:, 1::2]
    return {
        f"{stem.replace('gate_up', 'gate')}.{last}": gate,
        f"{stem.replace('gate_up', 'up')}.{last}": up,
    }


def latent(name: str, array: Array, config: Any) -> Mapping[str, Array]:
    """DeepSeek: the maps of keys, turned, and of values apart."""
    if name.endswith("kv_b_proj.weight"):
        heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        return {
            name.replace("kv_b_proj", "k_b_proj"): keys.swapaxes(1, 2),
            name.replace("kv_b_proj", "v_b_proj"): values,
        }
    return experts(name.replace("correction_bias", "correction.bias"), array, config)


def latent_metadata(config: Any) -> Mapping[str, Any]:
    turning, rank = config.qk_rope_head_dim, config.kv_lora_rank
    everywhere = config.rope_parameters.get("mscale_all_dim")
    return {
        Keys.Attention.HEAD_COUNT_KV: 1,
        Keys.Attention.KEY_LENGTH: rank + turning,
        Keys.Attention.VALUE_LENGTH: rank,
        Keys.Attention.KEY_LENGTH_MLA: config.qk_nope_head_dim + turning,
        Keys.Attention.VALUE_LENGTH_MLA: config.v_head_dim,
        Keys.Rope.DIMENSION_COUNT: turning,
        Keys.Rope.SCALING_YARN_LOG_MUL: None if everywhere is None else 0.1 * everywhere,
    }

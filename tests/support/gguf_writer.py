"""Writes tiny GGUF files from transformers models, by llama.cpp's own conventions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSOR, TENSOR_NAMES, Keys
from numpy.typing import NDArray
from transformers import PreTrainedModel

from support.gguf_families import CONVENTIONS

Array = NDArray[np.float32]
# Which of a config's keys holds a number, and the metadata key that says it. The first that is there counts.
_COMMON: Mapping[str, tuple[str, ...]] = {
    Keys.LLM.BLOCK_COUNT: ("num_hidden_layers",),
    Keys.LLM.CONTEXT_LENGTH: ("max_position_embeddings", "seq_length"),
    Keys.LLM.EMBEDDING_LENGTH: ("hidden_size",),
    Keys.LLM.FEED_FORWARD_LENGTH: ("intermediate_size", "ffn_hidden_size", "n_inner"),
    Keys.Attention.HEAD_COUNT: ("num_attention_heads",),
    Keys.Attention.HEAD_COUNT_KV: ("num_key_value_heads", "num_kv_heads"),
    Keys.Attention.KEY_LENGTH: ("head_dim",),
    Keys.Attention.VALUE_LENGTH: ("head_dim",),
    Keys.Attention.LAYERNORM_EPS: ("layer_norm_eps", "layer_norm_epsilon"),
    Keys.Attention.LAYERNORM_RMS_EPS: ("rms_norm_eps",),
}
# Norms of heads that lie one by one, and what they are called together.
_ONE_OF_MANY = re.compile(r"(.*)\.norms\.\d+(\.\w+)")


def model_tensors(model: PreTrainedModel) -> dict[str, Array]:
    """Every tensor as a GGUF file names and forms it; no head when it is tied."""
    config = model.config
    convention = CONVENTIONS[config.model_type]
    names = get_tensor_name_map(convention.arch, config.num_hidden_layers)
    tensors = {}
    for name, value in _gathered(model.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for changed, array in convention.change(name, value, config).items():
            found = names.get_name(changed, try_suffixes=(".weight", ".bias"))
            assert found is not None, f"the gguf package has no name for {changed}"
            tensors[found] = np.ascontiguousarray(array)
    return tensors | _rotary_tensors(config)


def _gathered(state: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """The model's tensors; vectors of norms that lie head by head become one matrix."""
    gathered: dict[str, list[Array]] = {}
    for name, value in state.items():
        one = _ONE_OF_MANY.fullmatch(name)
        gathered.setdefault("".join(one.groups()) if one else name, []).append(value.numpy())
    return {
        name: np.stack(values)
        if f"{name.rpartition('.')[0]}.norms.0.weight" in state
        else values[0]
        for name, values in gathered.items()
    }


def _rope(config: Any) -> Mapping[str, Any]:
    """Rotary settings, of the layers that see everything where there are several kinds."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def _rotary_width(config: Any) -> int:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head * (_rope(config).get("partial_rotary_factor") or 1.0))


def _rotary_tensors(config: Any) -> dict[str, Array]:
    """Divisors of the frequencies, where a table of them is what GGUF has of the scaling."""
    rope, names = _rope(config), {}
    if rope.get("rope_type") == "longrope":
        names[MODEL_TENSOR.ROPE_FACTORS_LONG] = rope["long_factor"]
        names[MODEL_TENSOR.ROPE_FACTORS_SHORT] = rope["short_factor"]
    if rope.get("rope_type") == "llama3":
        names[MODEL_TENSOR.ROPE_FREQS] = list(_llama3(rope, _rotary_width(config)))
    return {
        f"{TENSOR_NAMES[tensor]}.weight": np.array(v, np.float32) for tensor, v in names.items()
    }


def _llama3(rope: Mapping[str, Any], width: int) -> Iterable[float]:
    """Divisors of Llama 3.1: 1 for short waves, the factor for long ones."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for pair in range(width // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * pair / width)
        turns = rope["original_max_position_embeddings"] / wave
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        yield 1 / ((1 - smooth) / rope["factor"] + smooth)


def metadata(config: Any) -> dict[str, Any]:
    """What a file says of a model, by the keys of the gguf package."""
    convention = CONVENTIONS[config.model_type]
    said: dict[str, Any] = dict(convention.constants)
    for key, fields in _COMMON.items():
        values = [getattr(config, field, None) for field in fields]
        said[key] = next((value for value in values if value is not None), None)
    for field, key in convention.keys.items():
        if getattr(config, field, None) is not None:
            said[key] = getattr(config, field)
    if said[Keys.LLM.FEED_FORWARD_LENGTH] is None:
        said[Keys.LLM.FEED_FORWARD_LENGTH] = 4 * config.hidden_size
    said |= _rotary_metadata(config) | dict(convention.derived(config))
    return {key: value for key, value in said.items() if value is not None}


def _rotary_metadata(config: Any) -> dict[str, Any]:
    rope = _rope(config)
    if not rope or getattr(config, "alibi", False):
        return {}
    every = config.rope_parameters
    said = {
        Keys.Rope.FREQ_BASE: float(rope["rope_theta"]),
        Keys.Rope.FREQ_BASE_SWA: every.get("sliding_attention", {}).get("rope_theta"),
        Keys.Rope.DIMENSION_COUNT: _rotary_width(config),
    }
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        said |= {Keys.Rope.SCALING_TYPE: kind, Keys.Rope.SCALING_FACTOR: rope["factor"]}
        said[Keys.Rope.SCALING_YARN_BETA_FAST] = rope.get("beta_fast")
        said[Keys.Rope.SCALING_YARN_BETA_SLOW] = rope.get("beta_slow")
    original = rope.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope"):
        said[Keys.Rope.SCALING_ORIG_CTX_LEN] = original
    if kind == "longrope":
        longer = config.max_position_embeddings / original
        factor = math.sqrt(1 + math.log(longer) / math.log(original))
        said[Keys.Rope.SCALING_ATTN_FACTOR] = factor
    return said


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    quantize: Callable[[str], GGMLQuantizationType] = lambda name: GGMLQuantizationType.F32,
    edit: Callable[[GGUFWriter], None] = lambda writer: None,
    without: frozenset[str] = frozenset(),
) -> Path:
    """Write a model.

    Args:
        path: The new file.
        model: A transformers model of a family in `support.gguf_families`.
        quantize: Type of each matrix by its GGUF name; vectors are always F32.
        edit: Adds metadata or tensors before the file is written.
        without: Metadata keys (without the family's prefix) to leave out.
    """
    arch = MODEL_ARCH_NAMES[CONVENTIONS[model.config.model_type].arch]
    writer = GGUFWriter(path, arch)
    writer.add_name("hot")
    for key, value in metadata(model.config).items():
        if key.removeprefix("{arch}.") not in without:
            _add(writer, key.format(arch=arch), value)
    edit(writer)
    for name, array in model_tensors(model).items():
        kind = quantize(name) if array.ndim > 1 else GGMLQuantizationType.F32
        if kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Metadata in the form that its Python type stands for."""
    kinds: Mapping[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    kinds[type(value)](key, value)

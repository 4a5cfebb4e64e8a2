"""Writes tiny Llama GGUF files from transformers models, by llama.cpp's own conventions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray
from transformers import PreTrainedModel

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """GGUF name of a transformers Llama tensor."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    stem, part = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[stem]}.{part}"


def interleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    width = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, width, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def model_tensors(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a Llama as a GGUF file names and orders it; no head when it is tied."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        for part, count in heads.items():
            if part in name:
                array = interleave(array, count)
        tensors[gguf_name(name)] = array
    return tensors


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
        model: A transformers Llama.
        quantize: Type of each matrix by its GGUF name; vectors are always F32.
        edit: Adds metadata or tensors before the file is written.
        without: Metadata keys (without "llama.") to leave out.
    """
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("hot")
    integers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    for key in integers.keys() - without:
        writer.add_uint32(f"llama.{key}", integers[key])
    writer.add_float32("llama.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
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

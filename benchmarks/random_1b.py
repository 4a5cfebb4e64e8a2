"""Write a Llama of 1.1 billion random weights as a GGUF file in fp16: a size where memory is the limit.

Its shape is that of TinyLlama (22 layers of 2048, 32 heads, 4 key-value heads). Its tokens are the bytes and
fillers. What it says means nothing; what it costs does.

    python benchmarks/random_1b.py random-1b.gguf
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

VOCABULARY, HIDDEN, LAYERS, INTERMEDIATE = 32000, 2048, 22, 5632
HEADS, KV_HEADS, CONTEXT = 32, 4, 2048
# Readers want at least one: a space (as byte-level tokenizers spell it) and a letter.
MERGE = ("\u0120", "t")
# Normal weights of this deviation keep activations about as large as a trained model's.
DEVIATION = 0.02


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, [outputs, inputs]."""
    kv = HIDDEN // HEADS * KV_HEADS
    yield "token_embd.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in (
            ("attn_norm", (HIDDEN,)),
            ("attn_q", (HIDDEN, HIDDEN)),
            ("attn_k", (kv, HIDDEN)),
            ("attn_v", (kv, HIDDEN)),
            ("attn_output", (HIDDEN, HIDDEN)),
            ("ffn_norm", (HIDDEN,)),
            ("ffn_gate", (INTERMEDIATE, HIDDEN)),
            ("ffn_up", (INTERMEDIATE, HIDDEN)),
            ("ffn_down", (HIDDEN, INTERMEDIATE)),
        ):
            yield f"blk.{layer}.{name}.weight", shape
    yield "output_norm.weight", (HIDDEN,)
    yield "output.weight", (VOCABULARY, HIDDEN)


def tokens() -> tuple[list[str], list[int]]:
    """Texts and kinds of the vocabulary: an end of text, every byte, fillers."""
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, "".join(MERGE)]
    fillers = [f"<filler_{i}>" for i in range(VOCABULARY - 1 - len(words))]
    kinds = [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * len(words)]
    kinds += [gguf.TokenType.UNUSED] * len(fillers)
    return ["<|end|>", *words, *fillers], [int(kind) for kind in kinds]


def describe(writer: gguf.GGUFWriter) -> None:
    """Config and tokenizer, by llama.cpp's keys."""
    writer.add_name("random-1b")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    texts, kinds = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)


def tensor(shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.generic]:
    """Random weights in fp16; ones in fp32 for a norm."""
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    values = random.standard_normal(shape, dtype=np.float32) * np.float32(DEVIATION)
    return values.astype(np.float16)


def write(file: Path, seed: int) -> None:
    """Write the file, whole or not at all."""
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    describe(writer)
    for name, shape in shapes():
        dtype = np.dtype(np.float32 if len(shape) == 1 else np.float16)
        count = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(name, shape, dtype, count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(seed)
    for _, shape in shapes():  # one at a time: all of them are 2.2 GB
        writer.write_tensor_data(tensor(shape, random))
    writer.close()
    os.replace(part, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="GGUF file to write (2.2 GB)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.file, options.seed)


if __name__ == "__main__":
    main()

"""GGUF files: exact values back, logits of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from support.gguf_writer import write_gguf
from support.hot import hot_model, oracle_logits
from support.parity import assert_logits_close

from onnxlm.models import load
from onnxlm.models.checkpoint import read
from onnxlm.models.checkpoint.gguf_blocks import unpack
from onnxlm.models.registry import find_architecture

TINY = dict(find_architecture("llama").tiny)
# Different head counts for Q and K, so that one used for the other is seen; rows of whole blocks.
GQA = {**TINY, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
PROMPT = [5, 17, 3, 91, 44, 2, 60, 60, 8, 33, 71, 12]
F16, F32 = GGMLQuantizationType.F16, GGMLQuantizationType.F32
EXACT = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]


@pytest.mark.parametrize("config", [GQA, {**GQA, "tie_word_embeddings": False}, TINY])
def test_f32_tensors_come_back_bit_for_bit(tmp_path: Path, config: dict[str, object]) -> None:
    oracle = hot_model(config)
    checkpoint = read(write_gguf(tmp_path / "a.gguf", oracle))
    original = {name.removeprefix("model."): value for name, value in oracle.state_dict().items()}
    if config["tie_word_embeddings"]:
        del original["lm_head.weight"]
    state = dict(checkpoint.state())
    assert state.keys() == original.keys()
    assert all(torch.equal(state[name], original[name]) for name in original)
    assert dict(checkpoint.quantized) == {}
    assert checkpoint.config.tie_word_embeddings == config["tie_word_embeddings"]


def test_metadata_becomes_the_config(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", hot_model(TINY))
    checkpoint = read(path)
    for key in ("head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size"):
        assert getattr(checkpoint.config, key) == checkpoint.raw_config[key] == TINY[key]
    assert checkpoint.provenance["general.name"] == "hot"
    assert checkpoint.provenance["files"] == {"tiny.gguf": path.stat().st_size}


@pytest.mark.parametrize(
    "change", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": False}]
)
def test_logits(tmp_path: Path, change: dict[str, object]) -> None:
    """Biases are known by their tensors alone; those of Q and K are interleaved like the rows."""
    oracle = hot_model({**GQA, **change})
    model = load(write_gguf(tmp_path / "a.gguf", oracle))
    assert_logits_close(model.logits(PROMPT), oracle_logits(oracle, PROMPT))


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_logits_with_scaled_rope(tmp_path: Path, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 500.0, "factor": 4.0}
    if rope_type == "yarn":
        rope["original_max_position_embeddings"] = 16

    def edit(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", rope_type)
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        if rope_type == "yarn":
            writer.add_uint32("llama.rope.scaling.original_context_length", 16)

    oracle = hot_model({**GQA, "max_position_embeddings": 64, "rope_parameters": rope})
    model = load(write_gguf(tmp_path / "a.gguf", oracle, edit=edit))
    ids = [(7 * position) % 96 for position in range(60)]
    assert_logits_close(model.logits(ids), oracle_logits(oracle, ids))


@pytest.mark.parametrize("kind", EXACT)
def test_block_quantized_tensors_are_exact(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Rows of Q and K are put back in order, codes and scales alike."""
    oracle = hot_model(GQA)
    checkpoint = read(write_gguf(tmp_path / "a.gguf", oracle, lambda name: kind))
    state = dict(checkpoint.state())
    assert len(checkpoint.quantized) == 1 + 7 * 2
    for name, tensor in checkpoint.quantized.items():
        # Blocks lie within rows, so quantizing the original rows gives the same blocks in order.
        original = oracle.state_dict()[f"model.{name}"].numpy()
        expected = quants.dequantize(quants.quantize(original, kind), kind)
        assert tensor.bits == int(kind.name[1])
        assert tensor.block_size == 32
        assert (tensor.offset is not None) == (kind.name == "Q4_1")
        assert tensor.codes.max() < 2**tensor.bits
        assert_same_floats(tensor.dequantize(), expected)
        assert torch.equal(state[name], torch.from_numpy(tensor.dequantize()))


def assert_same_floats(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal but for one unit in the last place in one value of a thousand."""
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=1)
    assert (ours != theirs).mean() <= 1e-3


@pytest.mark.parametrize("kind", EXACT)
def test_unpack_reads_every_bit_pattern(kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(0)
    block_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind.name]
    blocks = rng.integers(0, 256, (64, 5, block_bytes), dtype=np.uint8)
    # Finite scales of any sign and size, and offsets of like size, where m + 8 d is exact.
    halves = rng.standard_normal((64, 5, 2)).astype(np.float16)
    halves *= np.float16(2.0) ** rng.integers(-6, 6, (64, 5, 1)).astype(np.float16)
    count = 2 if kind.name == "Q4_1" else 1
    blocks[..., : 2 * count] = halves[..., :count].copy().view(np.uint8)
    rows = blocks.reshape(64, -1)
    tensor = unpack(rows, kind.name)
    assert tensor.shape == (64, 160)
    assert_same_floats(tensor.dequantize(), quants.dequantize(rows, kind))


@pytest.mark.parametrize("kind", [F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q5_0])
def test_other_types_are_dequantized(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    oracle = hot_model(GQA)
    checkpoint = read(write_gguf(tmp_path / "a.gguf", oracle, lambda name: kind))
    assert dict(checkpoint.quantized) == {}
    for name, value in checkpoint.state():
        original = oracle.state_dict()[f"model.{name}"]
        if original.dim() > 1:
            data = quants.dequantize(quants.quantize(original.numpy(), kind), kind)
            original = torch.from_numpy(np.ascontiguousarray(data))
        assert torch.equal(value.float(), original)


def test_k_quants_are_dequantized(tmp_path: Path) -> None:
    """The package writes no K-quants, so the blocks are random bytes with finite scales."""
    oracle = hot_model({**TINY, "hidden_size": 256, "intermediate_size": 256})
    kind = GGMLQuantizationType.Q6_K
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (256, 210), dtype=np.uint8)
    blocks[:, 208:] = np.float16(0.01).reshape(1).view(np.uint8)

    def edit(writer: GGUFWriter) -> None:
        add = writer.add_tensor

        def add_tensor(name: str, array: np.ndarray, **rest: object) -> None:
            if name == "blk.1.ffn_gate.weight":
                add(name, blocks, raw_dtype=kind)
            else:
                add(name, array, **rest)

        writer.add_tensor = add_tensor

    checkpoint = read(write_gguf(tmp_path / "a.gguf", oracle, edit=edit))
    value = dict(checkpoint.state())["layers.1.mlp.gate_proj.weight"]
    assert torch.equal(value, torch.from_numpy(quants.dequantize(blocks, kind)))
    assert "layers.1.mlp.gate_proj.weight" not in checkpoint.quantized

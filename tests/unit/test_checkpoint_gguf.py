"""GGUF files: exact values back, logits of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES
from support.gguf_writer import write_gguf
from support.hot import hot_model, oracle_logits
from support.parity import assert_logits_close

from onnxlm.models import load
from onnxlm.models.checkpoint import read
from onnxlm.models.checkpoint.gguf_blocks import unpack
from onnxlm.models.registry import find_architecture
from onnxlm.quantized_tensor import QuantizedTensor

TINY = dict(find_architecture("llama").tiny)
# Different head counts for Q and K, so that one used for the other is seen; rows of whole blocks.
GQA = {**TINY, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
PROMPT = [5, 17, 3, 91, 44, 2, 60, 60, 8, 33, 71, 12]
F16, F32 = GGMLQuantizationType.F16, GGMLQuantizationType.F32
# Types whose codes are taken over: bits and block that hold them, whether they have least values, and where
# their blocks have numbers of 16 bits.
EXACT = {
    "Q4_0": (4, 32, False, (0,)),
    "Q4_1": (4, 32, True, (0, 2)),
    "Q5_0": (8, 32, False, (0,)),
    "Q5_1": (8, 32, True, (0, 2)),
    "Q8_0": (8, 32, False, (0,)),
    "IQ4_NL": (8, 32, False, (0,)),
    "MXFP4": (8, 32, False, ()),
    "Q2_K": (4, 16, True, (80, 82)),
    "Q3_K": (4, 16, False, (108,)),
    "Q4_K": (4, 32, True, (0, 2)),
    "Q5_K": (8, 32, True, (0, 2)),
    "Q6_K": (8, 16, False, (208,)),
}
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")  # by the gguf package


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


@pytest.mark.parametrize("name", WRITTEN)
def test_block_quantized_tensors_are_exact(tmp_path: Path, name: str) -> None:
    """Rows of Q and K are put back in order, codes and scales alike."""
    oracle, kind = hot_model(GQA), GGMLQuantizationType[name]
    checkpoint = read(write_gguf(tmp_path / "a.gguf", oracle, lambda tensor: kind))
    state = dict(checkpoint.state())
    assert len(checkpoint.quantized) == 1 + 7 * 2
    for parameter, tensor in checkpoint.quantized.items():
        # Blocks lie within rows, so quantizing the original rows gives the same blocks in order.
        original = oracle.state_dict()[f"model.{parameter}"].numpy()
        expected = quants.dequantize(quants.quantize(original, kind), kind)
        assert_form(tensor, name)
        assert_same_floats(tensor.dequantize(), expected)
        assert torch.equal(state[parameter], torch.from_numpy(tensor.dequantize()))


def assert_form(tensor: QuantizedTensor, name: str) -> None:
    bits, block_size, has_offset, _ = EXACT[name]
    assert (tensor.bits, tensor.block_size) == (bits, block_size)
    assert (tensor.offset is not None) == has_offset
    assert int(tensor.codes.max()) < 2**bits


def assert_same_floats(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal but for one unit in the last place of the block's largest value, in few values."""
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-7 * float(np.abs(theirs).max()))
    assert (ours != theirs).mean() <= 5e-3


@pytest.mark.parametrize("name", [name for name in EXACT if name != "MXFP4"])
def test_unpack_reads_every_bit_pattern(name: str) -> None:
    rows = random_rows(name, 64, 5)
    tensor = unpack(rows, name)
    assert_form(tensor, name)
    assert_same_floats(tensor.dequantize(), quants.dequantize(rows, GGMLQuantizationType[name]))


def test_mxfp4_of_every_exponent_and_code() -> None:
    """E2M1 numbers times powers of two: OCP Microscaling Formats v1.0, section 5.3.3."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    exponents = np.arange(253)  # 6 times the next power is no float32
    low = np.arange(16)
    rows = np.concatenate(
        (exponents[:, None], np.broadcast_to(low | ((15 - low) << 4), (253, 16))), axis=1
    ).astype(np.uint8)
    signed = np.array(numbers + [-number for number in numbers])
    block = np.concatenate((signed, signed[::-1]))
    tensor = unpack(rows, "MXFP4")
    assert_form(tensor, "MXFP4")
    expected = (2.0 ** (exponents[:, None] - 127.0) * block).astype(np.float32)
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    np.testing.assert_array_equal(expected, quants.dequantize(rows, GGMLQuantizationType.MXFP4))


def random_rows(name: str, rows: int, blocks: int) -> np.ndarray:
    """Blocks of any codes, with finite scales of any sign and size, and least values of like size."""
    rng = np.random.default_rng(0)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    magnitude = np.float16(2.0) ** rng.integers(-6, 6, (rows, blocks)).astype(np.float16)
    for start in EXACT[name][3]:
        halves = rng.standard_normal((rows, blocks)).astype(np.float16) * magnitude
        data[..., start : start + 2] = halves[..., None].view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", [F16, GGMLQuantizationType.BF16])
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


@pytest.mark.parametrize("name", [name for name in EXACT if name not in WRITTEN])
def test_types_that_the_gguf_package_does_not_write(tmp_path: Path, name: str) -> None:
    oracle = hot_model({**TINY, "hidden_size": 256, "intermediate_size": 256})
    kind = GGMLQuantizationType[name]
    rows = random_rows(name, 256, 256 // GGML_QUANT_SIZES[kind][0])

    def edit(writer: GGUFWriter) -> None:
        add = writer.add_tensor

        def add_tensor(tensor: str, array: np.ndarray, **rest: object) -> None:
            if tensor == "blk.1.ffn_gate.weight":
                add(tensor, rows, raw_dtype=kind)
            else:
                add(tensor, array, **rest)

        writer.add_tensor = add_tensor

    checkpoint = read(write_gguf(tmp_path / "a.gguf", oracle, edit=edit))
    parameter = "layers.1.mlp.gate_proj.weight"
    assert_form(checkpoint.quantized[parameter], name)
    assert_same_floats(dict(checkpoint.state())[parameter].numpy(), quants.dequantize(rows, kind))


@pytest.mark.parametrize("family", ["phi3", "bloom"])
def test_codes_of_packed_projections_are_cut_like_their_values(tmp_path: Path, family: str) -> None:
    oracle = hot_model(find_architecture(family).tiny)
    kind = GGMLQuantizationType.Q4_1
    checkpoint = read(write_gguf(tmp_path / "a.gguf", oracle, lambda name: kind))
    state = dict(checkpoint.state())
    assert {name for name, value in state.items() if value.dim() == 2} == set(checkpoint.quantized)
    for name, tensor in checkpoint.quantized.items():
        assert torch.equal(torch.from_numpy(tensor.dequantize()), state[name])

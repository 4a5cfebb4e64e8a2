"""Codes, scales and byte layouts of block quantization."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnxlm.errors import QuantizationError
from onnxlm.quantize import blocks
from onnxlm.quantized_tensor import QuantizedTensor

WIDTHS = (40, 96, 100, 576)
SIZES = (16, 32, 64, 128)
formats = st.tuples(st.sampled_from((4, 8)), st.sampled_from(SIZES), st.sampled_from(WIDTHS))


def hot_weight(seed: int, rows: int, columns: int) -> np.ndarray:
    """Heavy tails, a zero row, a row of one sign and an outlier channel."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(3, (rows, columns)).astype(np.float32)
    weight[:, rng.integers(columns)] *= 20
    weight[0] = 0
    weight[1] = np.abs(weight[1])
    return weight


@given(formats, st.integers(0, 2**32 - 1))
def test_packed_codes_come_back(form: tuple[int, int, int], seed: int) -> None:
    bits, size, columns = form
    codes = np.random.default_rng(seed).integers(0, 2**bits, (3, columns), np.uint8)
    count = blocks.block_count(columns, size)
    tensor = QuantizedTensor(bits, size, codes, np.ones((3, count), np.float32))
    matmul = blocks.pack_matmul(tensor)
    assert matmul.shape == (3, count, size * bits // 8)
    np.testing.assert_array_equal(blocks.unpack(matmul, bits, columns), codes)


def test_low_nibble_comes_first() -> None:
    codes = np.arange(16, dtype=np.uint8)[None]
    tensor = QuantizedTensor(4, 16, codes, np.ones((1, 1), np.float32))
    expected = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert blocks.pack_matmul(tensor).tolist() == [[expected]]


@given(formats, st.booleans(), st.integers(0, 2**32 - 1))
def test_error_is_at_most_half_a_step_inside_the_range(
    form: tuple[int, int, int], symmetric: bool, seed: int
) -> None:
    bits, size, columns = form
    weight = hot_weight(seed, 5, columns)
    tensor = blocks.round_to_nearest(weight, bits, size, symmetric=symmetric)
    step = np.repeat(tensor.scale, size, axis=1)[:, :columns]
    offset = np.zeros_like(tensor.scale) if tensor.offset is None else tensor.offset
    centred = weight - np.repeat(offset, size, axis=1)[:, :columns]
    ends = np.stack([-(2 ** (bits - 1)) * step, (2 ** (bits - 1) - 1) * step])
    slack = 1e-5 * np.abs(weight).max(axis=1, keepdims=True)
    inside = (centred >= ends.min(0) - slack) & (centred <= ends.max(0) + slack)
    error = np.abs(tensor.dequantize() - weight)
    assert (error <= np.abs(step) / 2 + slack)[inside].all()
    if not symmetric or bits == 8:
        assert inside.all()
    assert (error <= np.abs(step) + slack).all()


@given(formats, st.booleans(), st.integers(0, 2**32 - 1))
def test_quantizing_twice_changes_nothing(
    form: tuple[int, int, int], symmetric: bool, seed: int
) -> None:
    bits, size, columns = form
    once = blocks.round_to_nearest(
        hot_weight(seed, 4, columns), bits, size, symmetric=symmetric
    ).dequantize()
    twice = blocks.round_to_nearest(once, bits, size, symmetric=symmetric).dequantize()
    np.testing.assert_allclose(twice, once, atol=2e-6 * np.abs(once).max())


def test_one_scale_a_row() -> None:
    weight = hot_weight(0, 6, 100)
    tensor = blocks.round_to_nearest(weight, 8, 100)
    assert tensor.scale.shape == (6, 1)
    np.testing.assert_allclose(tensor.scale[:, 0], np.abs(weight).max(axis=1) / 127, rtol=1e-6)


@given(formats, st.integers(0, 2**32 - 1))
def test_short_scales_fit_sixteen_bits_and_clip_nothing(
    form: tuple[int, int, int], seed: int
) -> None:
    bits, size, columns = form
    weight = hot_weight(seed, 5, columns)
    tensor = blocks.round_to_nearest(weight, bits, size, short_scales=True)
    exact = blocks.round_to_nearest(weight, bits, size).scale
    assert np.array_equal(tensor.scale.astype(np.float16).astype(np.float32), tensor.scale)
    assert (np.abs(tensor.scale) >= np.abs(exact) * (1 - 1e-6)).all()
    assert (np.abs(tensor.scale) <= np.abs(exact) * 1.125).all()


@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_scales_that_sixteen_bits_do_not_hold_stay(factor: float) -> None:
    weight = hot_weight(1, 5, 64) * np.float32(factor)
    short = blocks.round_to_nearest(weight, 8, 32, short_scales=True)
    assert np.array_equal(short.scale, blocks.round_to_nearest(weight, 8, 32).scale)


def test_not_finite_is_refused() -> None:
    weight = np.ones((2, 32), np.float32)
    weight[1, 3] = np.nan
    with pytest.raises(QuantizationError, match="weight holds NaN or infinity"):
        blocks.round_to_nearest(weight, 8, 32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("size", SIZES)
def test_the_matmul_kernel_reads_the_layout(bits: int, columns: int, size: int) -> None:
    tensor = blocks.round_to_nearest(hot_weight(7, 9, columns), bits, size)
    x = np.random.default_rng(1).standard_normal((4, columns)).astype(np.float32)
    node = helper.make_node(
        "MatMulNBits",
        ["x", "data", "scale"],
        ["y"],
        domain="com.microsoft",
        K=columns,
        N=9,
        bits=bits,
        block_size=size,
    )
    y = _run(node, {"data": blocks.pack_matmul(tensor), "scale": tensor.scale}, x)
    expected = x.astype(np.float64) @ tensor.dequantize().astype(np.float64).T
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


@settings(deadline=None, max_examples=10)
@given(st.sampled_from((4, 8)), st.sampled_from(SIZES), st.integers(0, 2**32 - 1))
def test_the_gather_kernel_reads_the_layout(bits: int, size: int, seed: int) -> None:
    tensor = blocks.round_to_nearest(hot_weight(seed, 7, 4 * size), bits, size)
    node = helper.make_node(
        "GatherBlockQuantized",
        ["data", "x", "scale"],
        ["y"],
        domain="com.microsoft",
        bits=bits,
        block_size=size,
        gather_axis=0,
        quantize_axis=1,
    )
    ids = np.array([[6, 0, 3]], np.int64)
    y = _run(node, {"data": blocks.pack_matmul(tensor).reshape(7, -1), "scale": tensor.scale}, ids)
    np.testing.assert_allclose(y, tensor.dequantize()[ids], rtol=1e-6)


def _run(node: object, weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    kind = TensorProto.INT64 if x.dtype == np.int64 else TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info("x", kind, list(x.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]

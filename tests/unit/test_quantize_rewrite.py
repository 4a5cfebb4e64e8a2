"""Quantized operators in the place of layers and embeddings, against the weights that their codes mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from parity.tolerances import tolerance
from support.onnx_text import graph, operators, random, run

from onnxlm.quantize.blocks import round_to_nearest
from onnxlm.quantize.rewrite import LOWERINGS, Rewriter
from onnxlm.quantized_tensor import QuantizedTensor

Floats = NDArray[np.float32]
EXACT = tolerance("pass", "float32")
WIDTHS = (64, 100, 150)
LAYER = "y = com.microsoft.FusedMatMul <transB=1> (x, w.weight)"
ROWS = 24


def layer(columns: int, bias: bool = False) -> ir.Model:
    body = "p = com.microsoft.FusedMatMul <transB=1> (x, w.weight)\ny = Add (p, w.bias)"
    weights = {"w.weight": random(ROWS, columns)} | ({"w.bias": random(ROWS)} if bias else {})
    io = f"float[B,S,{columns}] x", f"float[B,S,{ROWS}] y"
    return graph(*io, body if bias else LAYER, weights)


def weight(model: ir.Model, name: str = "w.weight") -> Floats:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    array: Floats = tensor.numpy()
    return array


def rewrite(
    model: ir.Model, tensors: Mapping[str, QuantizedTensor], lowering: str = "ort"
) -> ir.Model:
    """The weights that have codes are not needed any more."""
    Rewriter(tensors, lowering).rewrite(model.graph)
    for name in tensors:
        assert not model.graph.initializers[name].uses()
        del model.graph.initializers[name]
    return model


def exact(model: ir.Model) -> ir.Model:
    """With activations in fp32."""
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    return model


def close(actual: Floats, expected: NDArray[np.float64]) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= EXACT * max(1.0, np.abs(expected).max())


def eight_bit_blocks(x: Floats, size: int) -> Floats:
    """x [..., K] rounded to 255 levels of each block's range, as accuracy level 4 documents it."""
    columns = x.shape[-1]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -columns % size)])
    blocks = padded.reshape(*x.shape[:-1], -1, size)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    codes = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    return (codes * step).reshape(padded.shape)[..., :columns]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize(("bits", "size"), [(4, 16), (4, 32), (8, 32), (8, 128)])
def test_a_layer_computes_with_the_dequantized_weight(
    bits: int, size: int, columns: int, symmetric: bool, lowering: str
) -> None:
    model = layer(columns, bias=True)
    tensor = round_to_nearest(weight(model), bits, size, symmetric=symmetric)
    bias = weight(model, "w.bias")
    rewritten = exact(rewrite(model, {"w.weight": tensor}, lowering))
    x = random(2, 3, columns)
    expected = x.astype(np.float64) @ tensor.dequantize().T + bias
    # A session that optimizes rounds the activations of standard operators; the next test is about that.
    for optimized in (False, True) if lowering == "ort" else (False,):
        close(run(rewritten, {"x": x}, optimized)["y"], expected)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize(("bits", "size", "symmetric"), [(4, 32, False), (8, 32, True)])
def test_standard_operators_are_what_the_standard_says(
    bits: int, size: int, symmetric: bool, columns: int
) -> None:
    """Against ONNX's own reference, which knows no operator of ONNX Runtime's."""
    model = tied(columns)
    tensor = round_to_nearest(weight(model), bits, size, symmetric=symmetric)
    for node in [node for node in model.graph if node.op_type == "FusedMatMul"]:
        node.replace_input_with(1, _other(model, columns))
    second = round_to_nearest(random(ROWS, columns, seed=1), bits, size, symmetric=symmetric)
    rewritten = rewrite(model, {"w.weight": tensor, "head": second}, "portable")
    del rewritten.graph.opset_imports["com.microsoft"]
    ids = np.array([[5, 0, ROWS - 1]])
    found = dict(
        zip(
            "ey",
            ReferenceEvaluator(ir.to_proto(rewritten)).run(None, {"input_ids": ids}),
            strict=True,
        )
    )
    expected = tensor.dequantize()[ids]
    close(found["e"], expected.astype(np.float64))
    close(found["y"], expected.astype(np.float64) @ second.dequantize().T)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize(("bits", "size"), [(4, 16), (4, 32), (8, 32), (8, 128)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_activations_are_rounded_to_eight_bits_a_block_and_to_nothing_else(
    bits: int, size: int, columns: int, symmetric: bool, tokens: int, lowering: str
) -> None:
    """Offsets multiply sums of the activations as they are, so only the centred codes see the rounding."""
    model = layer(columns)
    tensor = round_to_nearest(weight(model), bits, size, symmetric=symmetric)
    x = random(1, tokens, columns)
    x[..., 3] *= 30
    x[0, 0, :size] = 0  # a block without a range
    centred = QuantizedTensor(bits, size, tensor.codes, tensor.scale).dequantize()
    offset = tensor.dequantize().astype(np.float64) - centred
    expected = eight_bit_blocks(x, size).astype(np.float64) @ centred.T + x @ offset.T
    rewritten = rewrite(model, {"w.weight": tensor}, lowering)
    close(run(rewritten, {"x": x}, optimized=True)["y"], expected)


def optimized_model(model: ir.Model, folder: Path) -> ir.Model:
    """What a session makes of it."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return ir.load(folder / "optimized.onnx")


def gguf_like(columns: int, bits: int = 4) -> QuantizedTensor:
    """Blocks of 32 whose scale and least value have 16 bits, both of any sign."""
    rng = np.random.default_rng(columns)
    codes = rng.integers(0, 1 << bits, (ROWS, columns), dtype=np.uint8)
    scale, least = (
        rng.standard_normal((ROWS, -(-columns // 32))).astype(np.float16).astype(np.float32)
        for _ in range(2)
    )
    return QuantizedTensor(bits, 32, codes, scale, least + np.float32(1 << (bits - 1)) * scale)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("columns", [64, 100])
def test_a_session_folds_everything_but_the_products(
    columns: int, lowering: str, tmp_path: Path
) -> None:
    """Only constants keep the operator on its fast path; 16-bit scales must not be widened at every step."""
    model = rewrite(layer(columns), {"w.weight": gguf_like(columns)}, lowering)
    assert {"Cast", "Mul", "Transpose"} <= set(operators(model))
    found = optimized_model(model, tmp_path)
    pad = ["Pad"] if columns % 32 else []
    expected = ["MatMulNBits", *pad, "Reshape", "ReduceSum", "MatMul", "Add"]
    assert sorted(operators(found)) == sorted(expected)
    (node,) = [node for node in found.graph if node.op_type == "MatMulNBits"]
    assert all(value is not None and value.is_initializer() for value in node.inputs[1:3])
    assert node.inputs[2] is not None
    assert node.inputs[2].dtype == ir.DataType.FLOAT


def stored(model: ir.Model) -> dict[str, str]:
    """Element types of what is stored for the weight."""
    return {
        name.removeprefix("w.weight."): str(value.dtype)
        for name, value in model.graph.initializers.items()
        if name.startswith("w.weight.")
    }


@pytest.mark.parametrize("bits", [4, 8])
def test_least_values_of_gguf_blocks_are_stored_in_sixteen_bits_without_loss(bits: int) -> None:
    tensor = gguf_like(64, bits)
    assert tensor.offset is not None
    # The offsets themselves need more bits than are stored.
    assert not np.array_equal(tensor.offset.astype(np.float16), tensor.offset)
    model = rewrite(layer(64), {"w.weight": tensor})
    assert stored(model) == {f"q{bits}": "UINT8", "scale": "FLOAT", "minimum": "FLOAT16"}
    unit = np.eye(64, dtype=np.float32)[None]
    read = run(exact(model), {"x": unit}, optimized=True)["y"][0].T
    np.testing.assert_array_equal(read, tensor.dequantize())


@pytest.mark.parametrize(
    ("scale", "offset", "types"),
    [
        (0.1, None, {}),
        (0.125, None, {}),
        (1e6, None, {}),  # beyond 16 bits
        (-0.125, 0.1, {"offset": "FLOAT"}),
        (0.1, 0.31, {"offset": "FLOAT"}),
        (0.125, 1e6, {"offset": "FLOAT"}),
        (0.1, 0.5 + 8 * np.float32(0.1), {"minimum": "FLOAT16"}),
    ],
)
def test_numbers_keep_their_bits(
    scale: float, offset: float | None, types: Mapping[str, str]
) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (ROWS, 64), dtype=np.uint8)
    scales, offsets = (
        None if value is None else np.full((ROWS, 2), value, np.float32)
        for value in (scale, offset)
    )
    assert scales is not None
    tensor = QuantizedTensor(4, 32, codes, scales, offsets)
    model = rewrite(layer(64), {"w.weight": tensor})
    assert stored(model) == {"q4": "UINT8", "scale": "FLOAT", **types}
    unit = np.eye(64, dtype=np.float32)[None]
    read = run(exact(model), {"x": unit}, optimized=True)["y"][0].T
    np.testing.assert_array_equal(read, tensor.dequantize())


@pytest.mark.parametrize(("scale", "type_"), [(0.125, "FLOAT16"), (0.1, "FLOAT"), (1e6, "FLOAT")])
def test_portable_graphs_store_scales_in_sixteen_bits_that_hold_them(
    scale: float, type_: str
) -> None:
    codes = np.random.default_rng(0).integers(0, 256, (ROWS, 64), dtype=np.uint8)
    tensor = QuantizedTensor(8, 32, codes, np.full((ROWS, 2), scale, np.float32), None)
    model = rewrite(layer(64), {"w.weight": tensor}, "portable")
    assert stored(model)["scale"] == type_
    unit = np.eye(64, dtype=np.float32)[None]
    np.testing.assert_array_equal(run(model, {"x": unit})["y"][0].T, tensor.dequantize())


def tied(columns: int) -> ir.Model:
    body = """e = Gather (w.weight, input_ids)
        y = com.microsoft.FusedMatMul <transB=1> (e, w.weight)"""
    outputs = f"float[B,S,{columns}] e, float[B,S,{ROWS}] y"
    return graph("int64[B,S] input_ids", outputs, body, {"w.weight": random(ROWS, columns)})


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [40, 64, 97, 100])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (8, 32), (8, 128)])
def test_a_tied_table_is_stored_once(bits: int, size: int, columns: int, symmetric: bool) -> None:
    model = tied(columns)
    tensor = round_to_nearest(weight(model), bits, size, symmetric=symmetric)
    rewritten = exact(rewrite(model, {"w.weight": tensor}))
    offset = {} if symmetric else {"offset": "FLOAT"}
    shape = {"shape": "INT64"}
    assert stored(rewritten) == {f"q{bits}": "UINT8", "scale": "FLOAT", **shape, **offset}
    ids = np.array([[5, 0, ROWS - 1]])
    for optimized in (False, True):
        found = run(rewritten, {"input_ids": ids}, optimized)
        expected = tensor.dequantize()[ids]
        np.testing.assert_allclose(found["e"], expected, rtol=1e-6, atol=1e-6)
        close(found["y"], expected.astype(np.float64) @ tensor.dequantize().T)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("columns", [64, 100])
def test_gguf_blocks_of_a_table_are_stored_without_loss(columns: int, lowering: str) -> None:
    tensor = gguf_like(columns)
    rewritten = exact(rewrite(tied(columns), {"w.weight": tensor}, lowering))
    assert stored(rewritten)["minimum"] == "FLOAT16"
    ids = np.arange(ROWS)[None]
    found = run(rewritten, {"input_ids": ids})
    np.testing.assert_allclose(found["e"][0], tensor.dequantize(), rtol=1e-6, atol=1e-6)
    close(found["y"][0], tensor.dequantize().astype(np.float64) @ tensor.dequantize().T)


def test_an_embedding_may_have_codes_alone() -> None:
    model = tied(64)
    table = round_to_nearest(weight(model), 8, 32)
    for node in [node for node in model.graph if node.op_type == "FusedMatMul"]:
        node.replace_input_with(1, _other(model, 64))
    rewritten = rewrite(model, {"w.weight": table})
    assert operators(rewritten) == ["GatherBlockQuantized", "FusedMatMul"]


def _other(model: ir.Model, columns: int) -> ir.Value:
    value = ir.Value(
        name="head",
        const_value=ir.tensor(random(ROWS, columns, seed=1)),
        shape=ir.Shape([ROWS, columns]),
    )
    model.graph.register_initializer(value)
    return value


def test_layers_of_one_input_share_its_block_sums() -> None:
    body = f"{LAYER}\nz = com.microsoft.FusedMatMul <transB=1> (x, v.weight)"
    weights = {"w.weight": random(ROWS, 64), "v.weight": random(8, 64)}
    outputs = f"float[B,S,{ROWS}] y, float[B,S,8] z"
    model = graph("float[B,S,64] x", outputs, body, weights)
    tensors = {n: round_to_nearest(w, 4, 32, symmetric=False) for n, w in weights.items()}
    rewritten = exact(rewrite(model, tensors))
    assert operators(rewritten).count("ReduceSum") == 1
    x = random(1, 2, 64)
    found = run(rewritten, {"x": x})
    for name, output in (("w.weight", "y"), ("v.weight", "z")):
        close(found[output], x.astype(np.float64) @ tensors[name].dequantize().T)


def test_graphs_of_one_package_share_what_is_stored() -> None:
    first, second = layer(64), layer(64)
    rewriter = Rewriter({"w.weight": gguf_like(64)})
    for model in (first, second):
        rewriter.rewrite(model.graph)
    shared = [name for name in first.graph.initializers if name.startswith("w.weight.")]
    assert len(shared) == 3
    for name in shared:
        held = [model.graph.initializers[name].const_value for model in (first, second)]
        assert held[0] is held[1]


def test_what_has_no_codes_is_left_alone() -> None:
    model = layer(64)
    before = operators(model)
    Rewriter({}).rewrite(model.graph)
    assert operators(model) == before

"""One scale per output channel and one per token: exact sums, rows that do not see their neighbours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from parity.tolerances import tolerance
from support.onnx_text import graph, operators, random

from onnxlm.quantize.rewrite import LOWERINGS, Rewriter
from onnxlm.quantize.row import RowQuantized, quantize_rows
from onnxlm.runtime.saturation import products_saturate

Floats = NDArray[np.float32]
COLUMNS, ROWS = 96, 40
EXACT = tolerance("pass", "float32")
# Sessions of the runtime set this where integer products of this CPU saturate.
EXACT_PRODUCTS = {"session.x64quantprecision": "1"}


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-30, 1e30))
def test_error_is_half_a_step_of_the_channel(seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_t(3, (7, 33)) * size).astype(np.float32)
    weight[2] = 0
    tensor = quantize_rows(weight)
    assert tensor.codes.shape == (33, 7)
    assert np.abs(tensor.codes.astype(int)).max() == 127
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    assert (np.abs(tensor.dequantize() - weight) <= step * 0.5001).all()


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-38, 1e38])
def test_channels_of_any_size_have_finite_codes(size: float) -> None:
    tensor = quantize_rows(np.full((2, 8), size, np.float32))
    assert np.isfinite(tensor.scale).all()
    assert (np.abs(tensor.dequantize() - np.float32(size)) <= np.finfo(np.float32).tiny).all()


def model(*names: str, lowering: str = "ort") -> ir.Model:
    """Layers `names` of one input, in the per-row form, and their weights."""
    body = "\n".join(f"{n}.y = com.microsoft.FusedMatMul <transB=1> (x, {n})" for n in names)
    weights = {name: random(ROWS, COLUMNS, seed=i) for i, name in enumerate(names)}
    outputs = ", ".join(f"float[B,S,{ROWS}] {name}.y" for name in names)
    made = graph(
        f"float[B,S,{COLUMNS}] x", outputs.replace(".", "_"), body.replace(".y", "_y"), weights
    )
    Rewriter({}, lowering).rewrite(
        made.graph, {name: quantize_rows(w) for name, w in weights.items()}
    )
    return made


def session(made: ir.Model, options: dict[str, str]) -> ort.InferenceSession:
    settings_ = ort.SessionOptions()
    settings_.log_severity_level = 3
    settings_.intra_op_num_threads = 1
    for key, value in options.items():
        settings_.add_session_config_entry(key, value)
    return ort.InferenceSession(ir.to_proto(made).SerializeToString(), settings_)


def run(x: Floats, options: dict[str, str] | None = None, lowering: str = "ort") -> Floats:
    """The layer `w` of x [B, S, K]."""
    made = model("w", lowering=lowering)
    opened = session(made, EXACT_PRODUCTS if options is None else options)
    result: Floats = opened.run(None, {"x": x})[0]
    return result


def formula(x: Floats, tensor: RowQuantized) -> NDArray[np.float64]:
    """Codes of each token in [-127, 127], an exact product of integers, both scales."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    unit = np.divide(x, largest, out=np.zeros_like(x), where=largest > 0)
    codes = np.rint(unit / np.float32(1 / 127)).astype(np.int64)
    product = codes @ tensor.codes.astype(np.int64)
    return product * (tensor.scale.astype(np.float64) / 127) * largest


def close(actual: Floats, expected: NDArray[np.float64]) -> None:
    assert np.abs(actual - expected).max() <= EXACT * max(1.0, np.abs(expected).max())


def hardest(tokens: int) -> Floats:
    """Activations whose products are as large as they get: every one saturates where anything does."""
    signs = np.sign(random(ROWS, COLUMNS)[0])
    return np.broadcast_to(signs, (1, tokens, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("make", [lambda n: random(1, n, COLUMNS, seed=5), hardest])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_products_are_exact(tokens: int, make: Callable[[int], Floats], lowering: str) -> None:
    x = make(tokens)
    expected = formula(x, quantize_rows(random(ROWS, COLUMNS)))
    close(run(x, lowering=lowering), expected)
    if not products_saturate():
        close(run(x, {}, lowering), expected)


def test_a_row_does_not_see_its_neighbours() -> None:
    a, b = random(1, 1, COLUMNS, seed=1), random(1, 1, COLUMNS, seed=2)
    alone = run(a)
    beside = run(np.concatenate([a, 100 * b], axis=1))
    np.testing.assert_array_equal(beside[:, :1], alone)
    batched = run(np.concatenate([100 * b, a], axis=0))
    np.testing.assert_array_equal(batched[1:], alone)


def test_rows_of_zeros_give_zeros() -> None:
    x = random(1, 3, COLUMNS)
    x[0, 1] = 0
    y = run(x)
    assert np.isfinite(y).all()
    assert (y[0, 1] == 0).all()


@pytest.mark.parametrize("size", [1e-36, 1e-3, 1e30])
def test_rows_of_any_size_scale(size: float) -> None:
    x = random(1, 2, COLUMNS)
    np.testing.assert_allclose(
        run(x * np.float32(size)) / np.float32(size), run(x), rtol=1e-4, atol=1e-4
    )


def test_layers_of_one_input_quantize_it_once() -> None:
    made = model("w", "v")
    assert operators(made).count("QuantizeLinear") == 1
    x = random(1, 2, COLUMNS)
    found = session(made, EXACT_PRODUCTS).run(["w_y", "v_y"], {"x": x})
    for index, y in enumerate(found):
        close(y, formula(x, quantize_rows(random(ROWS, COLUMNS, seed=index))))

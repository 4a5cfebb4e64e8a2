"""Smoothing of a graph's parameters leaves the graph's function alone and evens out what its layers read."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from parity.tolerances import tolerance
from support.onnx_text import graph, random, run

from onnxlm.quantize.calibration import Statistics
from onnxlm.quantize.smoothed import Smoothing, smooth
from onnxlm.quantize.structure import Rows, linear_inputs

Floats = NDArray[np.float32]
H, INNER = 16, 24
EXACT = tolerance("pass", "float32")


def block() -> ir.Model:
    """Norm, merged gate and up with biases, activation, down."""
    body = """n = LayerNormalization (x, norm.weight, norm.bias)
        p = com.microsoft.FusedMatMul <transB=1> (n, both.weight)
        m = Add (p, both.bias)
        g, u = Split <axis=-1> (m, sizes)
        a = com.microsoft.QuickGelu <alpha=1.0> (g)
        h = Mul (a, u)
        y = MatMul (h, down.weight)"""
    weights = {
        "norm.weight": random(H),
        "norm.bias": random(H, seed=1),
        "both.weight": random(2 * INNER, H),
        "both.bias": random(2 * INNER),
        "down.weight": random(INNER, H),  # [K, N]
        "sizes": np.array([INNER, INNER], dtype=np.int64),
    }
    return graph(f"float[B,S,{H}] x", f"float[B,S,{H}] y", body, weights)


def parameter(model: ir.Model, name: str) -> Floats:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy().T if name == "down.weight" else tensor.numpy()


def apply(model: ir.Model, smoothing: Smoothing) -> ir.Model:
    for name in smoothing.changed:
        values = smoothing.apply(name, parameter(model, name))
        turned = np.ascontiguousarray(values.T if name == "down.weight" else values)
        model.graph.initializers[name].const_value = ir.tensor(turned, name=name)
    return model


def outliers(width: int) -> Statistics:
    """Channels that range over four decades."""
    seen = Statistics.empty(width)
    seen.add_range(np.geomspace(1e-2, 1e2, width, dtype=np.float32)[None])
    return seen


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_function_stays(alpha: float) -> None:
    model = block()
    x = random(2, 3, H)
    expected = run(model, {"x": x})["y"]
    seen = {"n": outliers(H), "h": outliers(INNER)}
    found = smooth(linear_inputs(model.graph), lambda n: parameter(model, n), seen, alpha)
    assert found.changed == {
        "norm.weight",
        "norm.bias",
        "both.weight",
        "both.bias",
        "down.weight",
    }
    actual = run(apply(model, found), {"x": x})["y"]
    assert np.abs(actual - expected).max() <= EXACT * np.abs(expected).max()


def test_the_gate_is_left_alone() -> None:
    model = block()
    seen = {"h": outliers(INNER)}
    found = smooth(linear_inputs(model.graph), lambda n: parameter(model, n), seen, 0.5)
    before, after = (
        parameter(model, "both.bias"),
        found.apply("both.bias", parameter(model, "both.bias")),
    )
    np.testing.assert_array_equal(after[:INNER], before[:INNER])
    assert (after[INNER:] != before[INNER:]).all()
    assert "norm.weight" not in found.changed


def test_statistics_follow_what_will_be_seen() -> None:
    """At full strength every channel that is read gets one range."""
    model = block()
    seen = {"n": outliers(H), "h": outliers(INNER)}
    smooth(linear_inputs(model.graph), lambda n: parameter(model, n), seen, 1.0)
    for statistics in seen.values():
        assert statistics.abs_max.max() / statistics.abs_max.min() == pytest.approx(1, abs=1e-3)


def test_factors_of_one_parameter_come_together() -> None:
    values = random(4, 3)
    smoothing = Smoothing()
    assert smoothing.apply("w", values) is values
    smoothing.multiply_columns("w", np.array([1, 2, 4], np.float32))
    smoothing.multiply_columns("w", np.array([1, 1, 2], np.float32))
    smoothing.divide_rows(Rows("w", 1, 3), 4, np.array([2, 4], np.float32))
    smoothing.divide_rows(Rows("w", 2, 4), 4, np.array([2, 8], np.float32))
    factors = np.array([1, 1 / 2, 1 / 8, 1 / 8])[:, None] * np.array([1, 2, 8])
    np.testing.assert_allclose(smoothing.apply("w", values), values * factors, rtol=1e-6)
    assert smoothing.changed == {"w"}

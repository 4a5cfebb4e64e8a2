"""silu: x * Sigmoid(x) -> QuickGelu(x, alpha=1)."""

from __future__ import annotations

import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators, random

FEEDS = {"x": random(2, 3, 8)}


@pytest.mark.parametrize("product", ["Mul(x, s)", "Mul(s, x)"])
def test_fires(product: str) -> None:
    model = graph("float[B,S,8] x", "float[B,S,8] y", f"s = Sigmoid(x)\ny = {product}", {})
    assert_fires("silu", model, FEEDS)
    assert operators(model) == ["QuickGelu"]
    (node,) = model.graph
    assert node.attributes["alpha"].as_float() == 1.0


NEAR_MISSES = {
    "gate of another value": "n = Neg(x)\ns = Sigmoid(n)\ny = Mul(x, s)",
    "gate read twice": "s = Sigmoid(x)\nm = Mul(x, s)\ny = Add(m, s)",
    "scaled gate": "n = Add(x, x)\ns = Sigmoid(n)\ny = Mul(x, s)",
    "another activation": "s = Tanh(x)\ny = Mul(x, s)",
    "sum, no product": "s = Sigmoid(x)\ny = Add(x, s)",
    "square of the gate": "s = Sigmoid(x)\ny = Mul(s, s)",
}


@pytest.mark.parametrize("body", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_misses(body: str) -> None:
    assert_leaves_alone("silu", graph("float[B,S,8] x", "float[B,S,8] y", body, {}), FEEDS)


def test_gate_that_is_an_output_stays() -> None:
    outputs = "float[B,S,8] y, float[B,S,8] s"
    model = graph("float[B,S,8] x", outputs, "s = Sigmoid(x)\ny = Mul(x, s)", {})
    assert_leaves_alone("silu", model, FEEDS)


def test_value_that_is_an_output_stays_one() -> None:
    """What is read, and the product, may be outputs: both are still there."""
    outputs = "float[B,S,8] x2, float[B,S,8] y"
    body = "x2 = Add(x, x)\ns = Sigmoid(x2)\ny = Mul(x2, s)"
    assert_fires("silu", graph("float[B,S,8] x", outputs, body, {}), FEEDS)

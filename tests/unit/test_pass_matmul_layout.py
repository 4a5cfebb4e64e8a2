"""matmul_layout: x @ Transpose(W) -> x @ (W^T stored)."""

from __future__ import annotations

import numpy as np
import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators, random

X = "float[B,S,8] x"
FEEDS = {"x": random(2, 3, 8)}
W = {"up.weight": random(5, 8)}
TURN = "w = Transpose<perm=[1,0]>(up.weight)"


def test_fires_and_keeps_the_name() -> None:
    model = graph(X, "float[B,S,5] y", f"{TURN}\ny = MatMul(x, w)", W)
    assert_fires("matmul_layout", model, FEEDS)
    assert operators(model) == ["MatMul"]
    stored = model.graph.initializers["up.weight"].const_value
    assert len(model.graph.initializers) == 1
    assert stored is not None
    np.testing.assert_array_equal(stored.numpy(), W["up.weight"].T)


def test_every_weight_of_a_chain() -> None:
    body = f"{TURN}\nh = MatMul(x, w)\nv = Transpose(down.weight)\ny = MatMul(h, v)"
    weights = W | {"down.weight": random(8, 5)}
    model = graph(X, "float[B,S,8] y", body, weights)
    assert_fires("matmul_layout", model, FEEDS, times=2)
    assert set(model.graph.initializers) == set(weights)


NEAR_MISSES = {
    "weight read elsewhere too": f"h = Neg(up.weight)\n{TURN}\ny = MatMul(x, w)",
    "two products of one Transpose": (
        f"{TURN}\na = MatMul(x, w)\nn = Neg(x)\nb = MatMul(n, w)\ny = Add(a, b)"
    ),
    "two Transposes of one weight": (
        f"{TURN}\nv = Transpose<perm=[1,0]>(up.weight)\n"
        "a = MatMul(x, w)\nb = MatMul(x, v)\ny = Add(a, b)"
    ),
    "identity permutation": "w = Transpose<perm=[0,1]>(flat.weight)\ny = MatMul(x, w)",
}


@pytest.mark.parametrize("body", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_weights_with_other_readers_are_stored_once(body: str) -> None:
    weights = W if "flat" not in body else {"flat.weight": random(8, 5)}
    outputs = "float[B,S,N] y, float[R,C] h" if "h = " in body else "float[B,S,N] y"
    assert_leaves_alone("matmul_layout", graph(X, outputs, body, weights), FEEDS)


def test_transposed_weight_that_is_an_output_stays() -> None:
    body = f"{TURN}\ny = MatMul(x, w)"
    model = graph(X, "float[B,S,5] y, float[8,5] w", body, W)
    assert_leaves_alone("matmul_layout", model, FEEDS)

"""torch_layout: x @ Transpose(W) -> FusedMatMul(x, W, transB=1)."""

from __future__ import annotations

import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators, random

X = "float[B,S,8] x"
FEEDS = {"x": random(2, 3, 8)}
W = {"up.weight": random(5, 8)}


def test_fires_and_keeps_the_weight() -> None:
    body = "w = Transpose<perm=[1,0]>(up.weight)\ny = MatMul(x, w)"
    model = graph(X, "float[B,S,5] y", body, W)
    assert_fires("torch_layout", model, FEEDS)
    (node,) = model.graph
    assert (node.domain, node.op_type) == ("com.microsoft", "FusedMatMul")
    assert list(model.graph.initializers) == ["up.weight"]
    assert tuple(model.graph.initializers["up.weight"].const_value.shape) == (5, 8)  # type: ignore[union-attr]


def test_transpose_without_perm_is_the_same() -> None:
    body = "w = Transpose(up.weight)\ny = MatMul(x, w)"
    assert_fires("torch_layout", graph(X, "float[B,S,5] y", body, W), FEEDS)


def test_tied_table_serves_both_from_one_tensor() -> None:
    body = (
        "h = Gather(table, ids)\nw = Transpose<perm=[1,0]>(table)\n"
        "y = MatMul(h, w)\nz = MatMul(x, w)"
    )
    model = graph(
        f"{X}, int64[B,S] ids", "float[B,S,7] y, float[B,S,7] z", body, {"table": random(7, 8)}
    )
    feeds = FEEDS | {"ids": (random(2, 3) > 0).astype("int64")}
    assert_fires("torch_layout", model, feeds, times=2)
    assert operators(model) == ["Gather", "FusedMatMul", "FusedMatMul"]
    assert list(model.graph.initializers) == ["table"]


NEAR_MISSES = {
    "stored as [K, N]": ("y = MatMul(x, turned.weight)", {"turned.weight": random(8, 5)}),
    "identity permutation": (
        "w = Transpose<perm=[0,1]>(turned.weight)\ny = MatMul(x, w)",
        {"turned.weight": random(8, 5)},
    ),
    "weight is computed": (
        "v = Neg(up.weight)\nw = Transpose<perm=[1,0]>(v)\ny = MatMul(x, w)",
        W,
    ),
    "one weight a row": (
        "w = Transpose<perm=[0,2,1]>(rows.weight)\ny = MatMul(x, w)",
        {"rows.weight": random(2, 5, 8)},
    ),
    "weight on the left": (
        "v = Transpose<perm=[1,0]>(square.weight)\nw = MatMul(v, square.weight)\ny = MatMul(x, w)",
        {"square.weight": random(8, 8)},
    ),
}


@pytest.mark.parametrize(("body", "weights"), NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_misses(body: str, weights: dict) -> None:
    assert_leaves_alone("torch_layout", graph(X, "float[B,S,N] y", body, weights), FEEDS)


def test_weight_that_the_caller_gives_stays_an_input() -> None:
    body = "w = Transpose<perm=[1,0]>(w0)\ny = MatMul(x, w)"
    model = graph(f"{X}, float[5,8] w0", "float[B,S,5] y", body, {})
    assert_leaves_alone("torch_layout", model, FEEDS | {"w0": random(5, 8)})

"""clean: shape arithmetic folded, equal subexpressions merged, weights untouched."""

from __future__ import annotations

import numpy as np
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators, random

X = "float[B,S,8] x"
FEEDS = {"x": random(2, 3, 8)}


def test_constants_are_folded_and_become_initializers() -> None:
    body = (
        "a = Constant<value_int=3>()\nb = Constant<value_int=5>()\nc = Add(a, b)\n"
        "m = Constant<value_ints=[-1]>()\nd = Reshape(c, m)\nz = Constant<value_ints=[2, -1]>()\n"
        "s = Concat<axis=0>(z, d)\ny = Reshape(x, s)"
    )
    model = graph(X, "float[P,Q,R] y", body, {})
    assert_fires("clean", model, FEEDS, times=7)
    assert operators(model) == ["Reshape"]
    (shape,) = model.graph.initializers.values()
    assert shape.const_value is not None
    assert shape.const_value.numpy().tolist() == [2, -1, 8]


def test_equal_subexpressions_become_one() -> None:
    body = "a = Neg(x)\nb = Neg(x)\nc = Identity(b)\ny = Mul(a, c)"
    model = graph(X, "float[B,S,8] y", body, {})
    assert_fires("clean", model, FEEDS, times=2)
    assert operators(model) == ["Neg", "Mul"]


def test_what_nothing_reads_goes() -> None:
    body = "a = Exp(x)\nb = Mul(a, unused)\ny = Neg(x)"
    model = graph(X, "float[B,S,8] y", body, {"unused": random(8)})
    assert_fires("clean", model, FEEDS, times=2)
    assert list(model.graph.initializers) == []


def test_equal_constants_become_one() -> None:
    body = "a = Constant<value_float=2.0>()\nb = Constant<value_float=2.0>()\nm = Mul(x, a)\ny = Add(m, b)"
    model = graph(X, "float[B,S,8] y", body, {})
    assert_fires("clean", model, FEEDS, times=2)
    assert len(model.graph.initializers) == 1


def test_equal_weights_stay_two() -> None:
    """Norms and biases of a fresh model are all ones or all zeros; each keeps its name."""
    weights = {"a.norm.weight": np.ones(8, np.float32), "b.norm.weight": np.ones(8, np.float32)}
    body = "m = Mul(x, a.norm.weight)\ny = Mul(m, b.norm.weight)"
    assert_leaves_alone("clean", graph(X, "float[B,S,8] y", body, weights), FEEDS)


def test_arithmetic_on_small_weights_is_not_folded() -> None:
    """A folded weight would have the tracer's name, not its parameter's."""
    weights = {"a.bias": random(8), "b.weight": random(4, 8)}
    body = "t = Transpose<perm=[1,0]>(b.weight)\nm = MatMul(x, t)\nn = Neg(a.bias)\nz = Add(x, n)"
    model = graph(X, "float[B,S,4] m, float[B,S,8] z", body, weights)
    assert_leaves_alone("clean", model, FEEDS)

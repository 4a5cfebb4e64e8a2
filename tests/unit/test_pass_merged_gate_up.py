"""merged_gate_up: silu(gate(x)) * up(x) -> one product, then Split."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators, random

X = "float[B,S,8] x"
FEEDS = {"x": random(2, 3, 8)}
WEIGHTS = {
    "layers.0.mlp.gate_proj.weight": random(6, 8),
    "layers.0.mlp.up_proj.weight": random(6, 8, seed=1),
}
BIASES = {
    "layers.0.mlp.gate_proj.bias": random(6, seed=2),
    "layers.0.mlp.up_proj.bias": random(6, seed=3),
}
GATE = "g = com.microsoft.FusedMatMul<transB=1>(x, layers.0.mlp.gate_proj.weight)"
UP = "u = com.microsoft.FusedMatMul<transB=1>(x, layers.0.mlp.up_proj.weight)"
SILU = "a = com.microsoft.QuickGelu<alpha=1.0>(g)"


def block(*lines: str, more: str = "", weights: dict = WEIGHTS):
    return graph(X, f"float[B,S,6] y{more}", "\n".join(lines), weights)


@pytest.mark.parametrize(
    "lines",
    [
        (GATE, SILU, UP, "y = Mul(a, u)"),
        (GATE, SILU, UP, "y = Mul(u, a)"),
        (UP, GATE, SILU, "y = Mul(a, u)"),
        (GATE, UP, SILU, "y = Mul(a, u)"),
    ],
    ids=["gate first", "up times gate", "up first", "both, then act"],
)
def test_fires(lines: tuple[str, ...]) -> None:
    model = block(*lines)
    assert_fires("merged_gate_up", model, FEEDS)
    assert operators(model) == ["FusedMatMul", "Split", "QuickGelu", "Mul"]
    assert set(model.graph.initializers) == {"layers.0.mlp.gate_up_proj.weight", "split_6_6"}
    merged = model.graph.initializers["layers.0.mlp.gate_up_proj.weight"]
    assert merged.const_value is not None
    np.testing.assert_array_equal(
        merged.const_value.numpy(), np.concatenate(list(WEIGHTS.values()))
    )
    assert json.loads(merged.metadata_props["onnxlm.parts"]) == [
        ["layers.0.mlp.gate_proj.weight", 0, 6],
        ["layers.0.mlp.up_proj.weight", 6, 12],
    ]


def test_biases_become_one_sum() -> None:
    lines = (
        GATE.replace("g =", "g0 ="),
        "g = Add(g0, layers.0.mlp.gate_proj.bias)",
        SILU,
        UP.replace("u =", "u0 ="),
        "u = Add(layers.0.mlp.up_proj.bias, u0)",
        "y = Mul(a, u)",
    )
    model = block(*lines, weights=WEIGHTS | BIASES)
    assert_fires("merged_gate_up", model, FEEDS)
    assert operators(model) == ["FusedMatMul", "Add", "Split", "QuickGelu", "Mul"]


def test_activation_with_another_reader_is_still_there() -> None:
    model = block(GATE, SILU, UP, "y = Mul(a, u)", more=", float[B,S,6] a")
    assert_fires("merged_gate_up", model, FEEDS)


def test_two_layers() -> None:
    second = [
        line.replace("layers.0", "layers.1").replace("(x", "(n")
        for line in (GATE.replace("g =", "g1 ="), UP.replace("u =", "u1 ="))
    ]
    weights = WEIGHTS | {name.replace("0", "1"): random(6, 8, seed=7) for name in WEIGHTS}
    lines = (GATE, SILU, UP, "m = Mul(a, u)", "n = Concat<axis=-1>(m, two)")
    end = ("a1 = com.microsoft.QuickGelu<alpha=1.0>(g1)", "y = Mul(a1, u1)")
    model = graph(
        f"{X}, float[B,S,2] two", "float[B,S,6] y", "\n".join([*lines, *second, *end]), weights
    )
    assert_fires("merged_gate_up", model, FEEDS | {"two": random(2, 3, 2)}, times=2)


NEAR_MISSES = {
    "another input": (GATE, SILU, "n = Neg(x)", UP.replace("(x", "(n"), "y = Mul(a, u)"),
    "another activation": (GATE, "a = Tanh(g)", UP, "y = Mul(a, u)"),
    "sum": (GATE, SILU, UP, "y = Add(a, u)"),
    "up is activated too": (GATE, SILU, UP, "b = Tanh(u)", "y = Mul(a, b)"),
    "gate is scaled": (
        GATE.replace("transB=1", "transB=1, alpha=2.0"),
        SILU,
        UP,
        "y = Mul(a, u)",
    ),
    "up is read twice": (GATE, SILU, UP, "m = Mul(a, u)", "y = Add(m, u)"),
    "gate is read twice": (GATE, SILU, UP, "m = Mul(a, u)", "y = Add(m, g)"),
}


@pytest.mark.parametrize("lines", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_misses(lines: tuple[str, ...]) -> None:
    assert_leaves_alone("merged_gate_up", block(*lines), FEEDS)


def test_gate_of_itself() -> None:
    weights = {name: value for name, value in WEIGHTS.items() if "gate" in name}
    model = block(GATE, SILU, "y = Mul(a, g)", weights=weights)
    assert_leaves_alone("merged_gate_up", model, FEEDS)


@pytest.mark.parametrize("value", ["g", "u"])
def test_products_that_are_outputs_stay(value: str) -> None:
    model = block(GATE, SILU, UP, "y = Mul(a, u)", more=f", float[B,S,6] {value}")
    assert_leaves_alone("merged_gate_up", model, FEEDS)

"""skip_norm: RMSNormalization(a + b) -> SkipSimplifiedLayerNormalization."""

from __future__ import annotations

import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators, random, run

INPUTS = "float[B,S,8] a, float[B,S,8] b"
# Small values, so that a wrong epsilon shows.
FEEDS = {"a": 0.02 * random(2, 3, 8), "b": 0.02 * random(2, 3, 8, seed=1)}
W = {"norm.weight": random(8)}
NORM = "y = RMSNormalization<axis=-1, epsilon=0.001>(t, norm.weight)"


def test_fires() -> None:
    model = graph(INPUTS, "float[B,S,8] y", f"t = Add(a, b)\n{NORM}", W)
    assert_fires("skip_norm", model, FEEDS)
    assert operators(model) == ["SkipSimplifiedLayerNormalization"]
    assert list(model.graph.initializers) == ["norm.weight"]


def test_sum_is_still_there_for_its_other_readers() -> None:
    outputs = "float[B,S,8] y, float[B,S,8] z, float[B,S,8] t"
    model = graph(INPUTS, outputs, f"t = Add(a, b)\nz = Neg(t)\n{NORM}", W)
    assert_fires("skip_norm", model, FEEDS)
    assert operators(model) == ["SkipSimplifiedLayerNormalization", "Neg"]


def test_second_norm_of_one_sum_stays_a_norm() -> None:
    body = f"t = Add(a, b)\n{NORM}\nz = RMSNormalization(t, other.weight)"
    weights = W | {"other.weight": random(8, seed=2)}
    model = graph(INPUTS, "float[B,S,8] y, float[B,S,8] z", body, weights)
    assert_fires("skip_norm", model, FEEDS)
    assert operators(model) == ["SkipSimplifiedLayerNormalization", "RMSNormalization"]


def test_default_epsilon_is_the_norms_own() -> None:
    body = "t = Add(a, b)\ny = RMSNormalization(t, norm.weight)"
    model = graph(INPUTS, "float[B,S,8] y", body, W)
    tiny = {name: value / 20 for name, value in FEEDS.items()}
    assert_fires("skip_norm", model, tiny)
    (node,) = model.graph
    assert node.attributes["epsilon"].as_float() == pytest.approx(1e-5)


def test_tower_of_residuals() -> None:
    body = (
        f"t = Add(a, b)\n{NORM}\nm = Neg(y)\nu = Add(t, m)\n"
        "z = RMSNormalization<axis=-1, epsilon=0.001>(u, norm.weight)"
    )
    model = graph(INPUTS, "float[B,S,8] z", f"{body}", W)
    for value in (node.outputs[0] for node in model.graph):
        value.shape = value.shape or model.graph.inputs[0].shape
    assert_fires("skip_norm", model, FEEDS, times=2)


NEAR_MISSES = {
    "bias, no residual": (INPUTS, f"t = Add(a, bias)\n{NORM}"),
    "broadcast residual": ("float[B,S,8] a, float[1,S,8] b", f"t = Add(a, b)\n{NORM}"),
    "flat activations": ("float[S,8] a, float[S,8] b", f"t = Add(a, b)\n{NORM}"),
    "four axes": ("float[B,S,1,8] a, float[B,S,1,8] b", f"t = Add(a, b)\n{NORM}"),
    "difference": (INPUTS, f"t = Sub(a, b)\n{NORM}"),
    "no sum": (INPUTS, f"t = Neg(a)\n{NORM}"),
    "two axes normalised": (
        INPUTS,
        "t = Add(a, b)\ny = RMSNormalization<axis=1, epsilon=0.001>(t, plane.weight)",
    ),
    "computed scale": (
        INPUTS,
        "t = Add(a, b)\nw = Neg(norm.weight)\ny = RMSNormalization<epsilon=0.001>(t, w)",
    ),
    "another norm": (INPUTS, "t = Add(a, b)\ny = LayerNormalization(t, norm.weight)"),
}


@pytest.mark.parametrize(("inputs", "body"), NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_misses(inputs: str, body: str) -> None:
    weights = {"norm.weight": random(8), "bias": random(8, seed=3), "plane.weight": random(3, 8)}
    used = {name: value for name, value in weights.items() if name in body}
    shape = inputs.split("]", maxsplit=1)[0].split("[")[1]
    model = graph(inputs, f"float[{shape}] y", body, used)
    sizes = {"B": 2, "S": 3}
    feeds = {
        value.name or "": random(*(sizes.get(str(dim), 0) or int(str(dim)) for dim in value.shape))
        for value in model.graph.inputs
        if value.shape is not None
    }
    assert_leaves_alone("skip_norm", model, feeds)


def test_unknown_shapes_are_left_alone() -> None:
    """Two values whose shapes are not recorded might broadcast."""
    body = f"c = Neg(a)\nd = Neg(b)\nt = Add(c, d)\n{NORM}"
    model = graph(INPUTS, "float[B,S,8] y", body, W)
    assert all(node.outputs[0].shape is None for node in list(model.graph)[:3])
    assert run(model, FEEDS)["y"].shape == (2, 3, 8)
    assert_leaves_alone("skip_norm", model, FEEDS)

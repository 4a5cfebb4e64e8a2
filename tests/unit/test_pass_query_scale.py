"""query_scale: the factor of a step's attention scores goes to the query."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators, random

PAST, WIDTH = 4, 8
FUSED = "num_heads=4, kv_num_heads=2, scale=0.3"
FUSED_BODY = "y, key, value = com.microsoft.GroupQueryAttention<{}>({}, pk, pv, n, t)"
PACKED, APART = "qkv, , ", "q, k, v"
STANDARD = "y = Attention<{}>(q, k, v, m)"


def fused(
    attributes: str = FUSED, layer: str = APART, new: str = "1", dtype: str = "float"
) -> ir.Model:
    cache = "float[B,2,P,8]"
    states = f"{cache} pk, {cache} pv, int32[B] n, int32 t"
    apart = f"float[B,{new},32] q, float[B,{new},16] k, float[B,{new},16] v"
    inputs = f"{apart if layer == APART else f'float[B,{new},64] qkv'}, {states}"
    outputs = f"float[B,{new},32] y, float[B,2,T,8] key, float[B,2,T,8] value"
    body = FUSED_BODY.format(attributes, layer)
    return graph(inputs.replace("float", dtype), outputs.replace("float", dtype), body, {})


def standard(attributes: str = "scale=0.3", new: str = "1") -> ir.Model:
    inputs = f"float[B,4,{new},8] q, float[B,2,T,8] k, float[B,2,T,8] v, bool[B,1,{new},T] m"
    return graph(inputs, f"float[B,4,{new},8] y", STANDARD.format(attributes), {})


def fused_feeds(layer: str = APART, dtype: str = "float32") -> dict[str, Any]:
    new = {"qkv": random(2, 1, 64)}
    if layer == APART:
        new = {"q": random(2, 1, 32), "k": random(2, 1, 16, seed=1), "v": random(2, 1, 16, seed=2)}
    caches = {"pk": random(2, 2, PAST, WIDTH, seed=3), "pv": random(2, 2, PAST, WIDTH, seed=4)}
    counts = {"n": np.array([PAST, 2], np.int32), "t": np.array(PAST + 1, np.int32)}
    return {name: value.astype(dtype) for name, value in (new | caches).items()} | counts


def standard_feeds() -> dict[str, Any]:
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=bool).reshape(2, 1, 1, PAST)
    caches = {"k": random(2, 2, PAST, WIDTH, seed=3), "v": random(2, 2, PAST, WIDTH, seed=4)}
    return {"q": random(2, 4, 1, WIDTH), **caches, "m": mask}


@pytest.mark.parametrize("attributes", [FUSED, FUSED.removesuffix(", scale=0.3")])
@pytest.mark.parametrize("layer", [APART, PACKED])
def test_fused(attributes: str, layer: str) -> None:
    """Keys and values that are packed behind the query stay as they are: the caches put out tell."""
    model = fused(attributes, layer)
    assert_fires("query_scale", model, fused_feeds(layer))
    assert operators(model) == ["Mul", "GroupQueryAttention"]


@pytest.mark.parametrize("attributes", ["scale=0.3", "softcap=0.0"])
def test_standard(attributes: str) -> None:
    model = standard(attributes)
    assert_fires("query_scale", model, standard_feeds())
    assert operators(model) == ["Mul", "Attention"]


@pytest.mark.parametrize(
    ("model", "given"),
    [
        pytest.param(fused(FUSED.replace("0.3", "1.0")), fused_feeds(), id="no factor"),
        pytest.param(fused(new="S"), fused_feeds(), id="several new tokens"),
        pytest.param(fused(dtype="float16"), fused_feeds(dtype="float16"), id="fp16"),
        pytest.param(standard("scale=1.0"), standard_feeds(), id="standard, no factor"),
        pytest.param(standard(new="S"), standard_feeds(), id="standard, several new tokens"),
    ],
)
def test_leaves_alone(model: ir.Model, given: dict[str, Any]) -> None:
    assert_leaves_alone("query_scale", model, given)

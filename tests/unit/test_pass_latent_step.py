"""latent_step: one key-value head, one new token a row -> products over all heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators, random, run

from onnxlm.export.passes import find_pass

ROWS, PAST, HEADS, WIDTH = 2, 6, 3, 8
# Tokens cached before the step; what is not a token is large.
CACHED = np.array([5, 2], dtype=np.int32)
PLAIN = "num_heads=3, kv_num_heads=1, scale=0.25"
INPUTS = (
    "float[B,1,24] q, float[B,1,8] k, float[B,1,8] v, float[B,1,P,8] past, float[B,1,P,8] other,"
    " int32[B] n, int32 t"
)
OUTPUTS = "float[B,1,24] y, float[B,1,T,8] present, float[B,1,T,8] twin"
SECOND = "float[B,1,T,8] z_present, float[B,1,T,8] z_twin"
WRITES = "y, present, twin = com.microsoft.GroupQueryAttention<{}>({}, past, {}, n, t{})"
MASK = ["Shape", "Cast", "Squeeze", "Range", "Reshape", "Greater", "Where"]
PRODUCTS = ["Reshape", "FusedMatMul", "Add", "Softmax", "MatMul", "Reshape"]


def step(
    attributes: str = PLAIN,
    layer: str = "q, k, k",
    second: str = "past",
    more: str = "",
    new: str = "1",
    dtype: str = "float",
) -> ir.Model:
    kinds = {"float": dtype, "B,1,24": f"B,{new},24", "B,1,8]": f"B,{new},8]"}
    inputs, outputs = INPUTS, OUTPUTS
    for before, after in kinds.items():
        inputs, outputs = inputs.replace(before, after), outputs.replace(before, after)
    return graph(inputs, outputs, WRITES.format(attributes, layer, second, more), {})


def feeds(new: int = 1, dtype: str = "float32") -> dict[str, Any]:
    cache = random(ROWS, 1, PAST, WIDTH)
    for row, count in enumerate(CACHED):
        cache[row, :, count:] = 1e4
    values = {
        "q": random(ROWS, new, HEADS * WIDTH),
        "k": random(ROWS, new, WIDTH, seed=1),
        "v": random(ROWS, new, WIDTH, seed=2),
        "past": cache,
        "other": cache,
    }
    given = {name: value.astype(dtype) for name, value in values.items()}
    return given | {"n": CACHED, "t": np.array(PAST, dtype=np.int32)}


@pytest.mark.parametrize("attributes", [PLAIN, "num_heads=3, kv_num_heads=1"])
def test_fires(attributes: str) -> None:
    model = step(attributes)
    assert_fires("latent_step", model, feeds())
    assert operators(model) == ["GroupQueryAttention", *MASK, *PRODUCTS]
    assert find_pass("query_scale")(model) == 0  # what is left of the operator scores nothing


def test_each_row_attends_to_its_own_tokens() -> None:
    """By hand: softmax(0.25 q c) c over a row's cached tokens and its new one."""
    model, given = step(), feeds()
    assert find_pass("latent_step")(model) == 1
    outputs = run(model, given)
    for row, count in enumerate(CACHED):
        tokens = np.concatenate((given["past"][row, 0, :count], given["k"][row])).astype(np.float64)
        scores = 0.25 * given["q"][row].reshape(HEADS, WIDTH) @ tokens.T
        shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        actual = outputs["y"][row].reshape(HEADS, WIDTH)
        np.testing.assert_allclose(actual, shares @ tokens, atol=1e-5)
        np.testing.assert_array_equal(outputs["present"][row, 0, : count + 1], np.float32(tokens))


def test_layers_share_one_mask() -> None:
    """Every cache of a model has as many columns."""
    first = WRITES.format(PLAIN, "q, k, k", "past", "")
    second = WRITES.format(PLAIN, "y, v, v", "other", "")
    second = second.replace("y, present, twin", "z_y, z_present, z_twin").replace("past", "other")
    model = graph(INPUTS, f"{OUTPUTS.replace('] y', '] z_y')}, {SECOND}", f"{first}\n{second}", {})
    attended = next(iter(model.graph)).outputs[0]
    attended.shape = ir.Shape(["B", 1, HEADS * WIDTH])
    attended.type = ir.TensorType(ir.DataType.FLOAT)
    assert_fires("latent_step", model, feeds(), times=2)
    assert operators(model) == [
        "GroupQueryAttention",
        *MASK,
        *PRODUCTS,
        "GroupQueryAttention",
        *PRODUCTS,
    ]


NEAR_MISSES: dict[str, dict[str, str]] = {
    "two caches": {"second": "other"},
    "values of their own": {"layer": "q, k, v"},
    "one head": {"attributes": "num_heads=1, kv_num_heads=1", "layer": "k, k, k"},
    "a window": {"attributes": f"{PLAIN}, local_window_size=2"},
    "a soft-cap": {"attributes": f"{PLAIN}, softcap=1.0"},
    "smooth softmax": {"attributes": f"{PLAIN}, smooth_softmax=1"},
}


@pytest.mark.parametrize("change", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_misses(change: dict[str, str]) -> None:
    model = step(**change)
    if "num_heads=1" in change.get("attributes", ""):
        model.graph.outputs[0].shape = ir.Shape(["B", 1, WIDTH])
    assert_leaves_alone("latent_step", model, feeds())


def test_a_prompt_is_left_alone() -> None:
    """Its queries are many rows already."""
    model = step(new="3")
    assert find_pass("latent_step")(model) == 0
    assert operators(model) == ["GroupQueryAttention"]


def test_half_precision_is_left_alone() -> None:
    assert_leaves_alone("latent_step", step(dtype="float16"), feeds(dtype="float16"))

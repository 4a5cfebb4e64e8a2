"""packed_qkv: three products in front of one attention -> one."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators, random

from onnxlm.export.passes import find_pass

HIDDEN, HEADS, KV_HEADS, WIDTH = 8, 4, 2, 8
ROWS = {"q": HEADS * WIDTH, "k": KV_HEADS * WIDTH, "v": KV_HEADS * WIDTH}
WEIGHTS = {
    f"layers.0.self_attn.{part}_proj.weight": random(rows, HIDDEN, seed=i)
    for i, (part, rows) in enumerate(ROWS.items())
}
BIASES = {
    f"layers.0.self_attn.{part}_proj.bias": random(rows, seed=9 + i)
    for i, (part, rows) in enumerate(ROWS.items())
}
CACHE = f"{KV_HEADS},P,{WIDTH}"
INPUTS = f"float[B,S,{HIDDEN}] x, float[B,{CACHE}] pk, float[B,{CACHE}] pv, int32[B] n, int32 t"
OUTPUTS = (
    f"float[B,S,{ROWS['q']}] y, float[B,{KV_HEADS},T,{WIDTH}] nk, float[B,{KV_HEADS},T,{WIDTH}] nv"
)
ATTENTION = (
    f"y, nk, nv = com.microsoft.GroupQueryAttention<num_heads={HEADS}, kv_num_heads={KV_HEADS}>"
    "({}, pk, pv, n, t)"
)
FEEDS = {
    "x": random(1, 3, HIDDEN),
    "pk": random(1, KV_HEADS, 2, WIDTH),
    "pv": random(1, KV_HEADS, 2, WIDTH, seed=1),
    "n": np.array([4], dtype=np.int32),
    "t": np.array(5, dtype=np.int32),
}


def product(part: str, x: str = "x", attributes: str = "transB=1") -> str:
    name = f"layers.0.self_attn.{part}_proj.weight"
    return f"{part} = com.microsoft.FusedMatMul<{attributes}>({x}, {name})"


def biased(part: str) -> str:
    layer = product(part).replace(f"{part} =", f"{part}0 =")
    return f"{layer}\n{part} = Add({part}0, layers.0.self_attn.{part}_proj.bias)"


def attention_graph(
    *lines: str, weights: dict = WEIGHTS, reads: str = "q, k, v", more: str = ""
) -> ir.Model:
    body = "\n".join([*lines, ATTENTION.format(reads)])
    return graph(INPUTS, OUTPUTS + more, body, weights)


def stored(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def test_fires() -> None:
    model = attention_graph(*map(product, "qkv"))
    assert_fires("packed_qkv", model, FEEDS)
    assert operators(model) == ["FusedMatMul", "GroupQueryAttention"]
    assert list(model.graph.initializers) == ["layers.0.self_attn.qkv_proj.weight"]
    packed = stored(model, "layers.0.self_attn.qkv_proj.weight")
    np.testing.assert_array_equal(packed, np.concatenate(list(WEIGHTS.values())))


def test_says_where_each_parameter_lies() -> None:
    model = attention_graph(*map(biased, "qkv"), weights=WEIGHTS | BIASES)
    assert find_pass("packed_qkv")(model) == 1
    again = ir.from_proto(ir.to_proto(model))
    for kind, originals in (("weight", WEIGHTS), ("bias", BIASES)):
        name = f"layers.0.self_attn.qkv_proj.{kind}"
        parts = json.loads(again.graph.initializers[name].metadata_props["onnxlm.parts"])
        assert [part[0] for part in parts] == list(originals)
        for parameter, start, end in parts:
            np.testing.assert_array_equal(stored(again, name)[start:end], originals[parameter])


def test_biases_become_one_sum() -> None:
    model = attention_graph(*map(biased, "qkv"), weights=WEIGHTS | BIASES)
    assert_fires("packed_qkv", model, FEEDS)
    assert operators(model) == ["FusedMatMul", "Add", "GroupQueryAttention"]
    assert list(model.graph.initializers) == [
        "layers.0.self_attn.qkv_proj.weight",
        "layers.0.self_attn.qkv_proj.bias",
    ]


def test_layer_without_bias_beside_layers_with_one() -> None:
    weights = WEIGHTS | {name: bias for name, bias in BIASES.items() if ".k_proj" not in name}
    model = attention_graph(biased("q"), product("k"), biased("v"), weights=weights)
    assert_fires("packed_qkv", model, FEEDS)
    bias = stored(model, "layers.0.self_attn.qkv_proj.bias")
    assert not bias[ROWS["q"] : ROWS["q"] + ROWS["k"]].any()


def test_bias_on_the_left() -> None:
    q = biased("q").replace("Add(q0, ", "Add(").replace("bias)", "bias, q0)")
    model = attention_graph(q, biased("k"), biased("v"), weights=WEIGHTS | BIASES)
    assert_fires("packed_qkv", model, FEEDS)


SHORT = {"short.weight": random(ROWS["k"], HIDDEN)}
NEAR_MISSES = {
    "another input of v": ["z = Neg(x)", product("q"), product("k"), product("v", "z")],
    "k is not a product": [product("q"), product("v"), "k = Neg(v)"],
    "k is scaled": [product("q"), product("k", attributes="transB=1, alpha=0.5"), product("v")],
    "k is added to itself": [product("q"), product("k0"), "k = Add(k0, k0)", product("v")],
    "k is read twice": [product("q"), product("k"), product("v"), "o = Neg(k)"],
}


@pytest.mark.parametrize("lines", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_misses(lines: list[str]) -> None:
    lines = [line.replace("k0_proj", "k_proj") for line in lines]
    weights = {name: value for name, value in WEIGHTS.items() if name in "\n".join(lines)}
    more = ", float[B,S,16] o" if "o = " in lines[-1] else ""
    model = attention_graph(*lines, weights=weights, more=more)
    assert_leaves_alone("packed_qkv", model, FEEDS)


def test_product_that_is_an_output_stays() -> None:
    model = attention_graph(*map(product, "qkv"), more=", float[B,S,16] k")
    assert_leaves_alone("packed_qkv", model, FEEDS)


def test_weight_shared_by_two_layers_is_stored_once() -> None:
    weights = {name: value for name, value in WEIGHTS.items() if ".v_proj" not in name}
    v = product("k").replace("k =", "v =")
    model = attention_graph(product("q"), product("k"), v, weights=weights)
    assert_leaves_alone("packed_qkv", model, FEEDS)


def test_keys_that_are_the_values_are_not_packed() -> None:
    weights = {name: value for name, value in WEIGHTS.items() if ".v_proj" not in name}
    model = attention_graph(product("q"), product("k"), weights=weights, reads="q, k, k")
    assert_leaves_alone("packed_qkv", model, FEEDS)


def test_bias_for_each_position_is_no_bias() -> None:
    """Added rows [S, N] would broadcast over the batch, not over positions."""
    weights = WEIGHTS | {"rows": random(3, ROWS["k"])}
    k = product("k").replace("k =", "k0 =") + "\nk = Add(k0, rows)"
    model = attention_graph(product("q"), k, product("v"), weights=weights)
    assert_leaves_alone("packed_qkv", model, FEEDS)


def test_matmul_layout_is_left_alone() -> None:
    """Weights stored [K, N] would have to be joined by columns."""
    turned = {name: np.ascontiguousarray(value.T) for name, value in WEIGHTS.items()}
    lines = [product(part, attributes="transB=0") for part in "qkv"]
    assert_leaves_alone("packed_qkv", attention_graph(*lines, weights=turned), FEEDS)

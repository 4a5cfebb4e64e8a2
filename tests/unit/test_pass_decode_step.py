"""decode_step: one new token a row."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from support.onnx_text import assert_leaves_alone, graph, random, run, structure

from onnxlm.export.passes import find_pass

CACHE = "batch_size,1,past_sequence_length,8"
INPUTS = (
    "float[batch_size,sequence_length,8] q, float[batch_size,sequence_length,8] k,"
    "float[batch_size,sequence_length,8] v,"
    f"float[{CACHE}] pk, float[{CACHE}] pv, int64[batch_size,total_sequence_length] attention_mask"
)
OUTPUTS = (
    "float[batch_size,sequence_length,8] y,"
    "float[batch_size,1,total_sequence_length,8] nk, float[batch_size,1,total_sequence_length,8] nv"
)
BODY = """
sum = ReduceSum<keepdims=0>(attention_mask, axis)
less = Sub(sum, one)
n = Cast<to=6>(less)
columns = Shape<start=1, end=2>(attention_mask)
t = Cast<to=6>(columns)
back = Neg(new)
new_mask = Slice(attention_mask, back, end, axis)
new_sum = ReduceSum<keepdims=0>(new_mask, axis)
m = Cast<to=6>(new_sum)
y, nk, nv = com.microsoft.GroupQueryAttention<num_heads=1, kv_num_heads=1>
    (q, k, v, pk, pv, n, t, , , , , , , , , , m)
new = Shape<start=1, end=2>(q)
"""
WEIGHTS = {
    "axis": np.array([1]),
    "one": np.array(1),
    "end": np.array([np.iinfo(np.int64).max]),
}


def attention() -> ir.Model:
    first, *rest = BODY.strip().split("\n")
    return graph(INPUTS, OUTPUTS, "\n".join([rest.pop(), first, *rest]), WEIGHTS)


def step(rows: int) -> dict[str, np.ndarray]:
    """Rows with 3, 2, 1 cached tokens and a new one."""
    past = np.array([[column < 3 - row for column in range(3)] for row in range(rows)])
    cache = {name: random(rows, 1, 3, 8, seed=5) for name in ("pk", "pv")}
    new = {name: random(rows, 1, 8, seed=i) for i, name in enumerate("qkv")}
    mask = np.concatenate([past, np.ones((rows, 1))], axis=1).astype(np.int64)
    return cache | new | {"attention_mask": mask}


def test_takes_out_what_longer_chunks_need() -> None:
    model = attention()
    before = {rows: run(model, step(rows)) for rows in (1, 3)}
    assert find_pass("decode_step")(model) == 1
    (node,) = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(node.inputs) <= 16
    assert "Slice" not in {node.op_type for node in model.graph}
    for rows, expected in before.items():
        for name, value in run(model, step(rows)).items():
            np.testing.assert_allclose(value, expected[name], atol=1e-6)


def test_declares_one_new_token() -> None:
    model = attention()
    find_pass("decode_step")(model)
    shapes = {v.name: [str(d) for d in v.shape or ()] for v in model.graph.inputs}
    assert shapes["q"] == ["batch_size", "1", "8"]
    assert shapes["attention_mask"] == ["batch_size", "total_sequence_length"]
    assert shapes["pk"] == ["batch_size", "1", "past_sequence_length", "8"]


def test_once_is_enough() -> None:
    model = attention()
    find_pass("decode_step")(model)
    once = structure(model)
    assert find_pass("decode_step")(model) == 0
    assert structure(model) == once


def test_other_operators_stay() -> None:
    model = graph("float[B,S,8] x", "float[B,S,8] y", "y = Neg(x)", {})
    assert_leaves_alone("decode_step", model, {"x": random(2, 3, 8)})

"""greedy_head: the arg-max of the last kept logits as one more output."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from support.onnx_text import graph, run, structure

from onnxlm.export.passes import find_pass

# By hand: arg-max of the last row of each batch row is 2, and 0 (the first of two equal ones).
LOGITS = np.array([[[9, 0, 0, 0], [1, 2, 4, 3]], [[0, 9, 0, 0], [5, 1, 5, 2]]], dtype=np.float32)


def head(columns: str) -> ir.Model:
    return graph(
        f"float[B,{columns},4] x", f"float[B,{columns},4] logits", "logits = Identity(x)", {}
    )


@pytest.mark.parametrize(("columns", "fed"), [("K", LOGITS), ("1", LOGITS[:, 1:])])
def test_arg_max_of_the_last_row(columns: str, fed: np.ndarray) -> None:
    model = head(columns)
    assert find_pass("greedy_head")(model) == 1
    outputs = run(model, {"x": fed})
    assert list(outputs) == ["logits", "next_tokens"]
    assert outputs["next_tokens"].dtype == np.int64
    assert outputs["next_tokens"].tolist() == [[2], [0]]
    np.testing.assert_array_equal(outputs["logits"], fed)


def test_a_step_has_no_slice() -> None:
    model = head("1")
    find_pass("greedy_head")(model)
    assert [node.op_type for node in model.graph] == ["Identity", "ArgMax"]


def test_declared_as_one_token_a_row() -> None:
    model = head("K")
    find_pass("greedy_head")(model)
    tokens = model.graph.outputs[-1]
    assert (tokens.dtype, [str(dim) for dim in tokens.shape or ()]) == (
        ir.DataType.INT64,
        ["batch_size", "1"],
    )


def test_once_is_enough() -> None:
    model = head("K")
    find_pass("greedy_head")(model)
    once = structure(model)
    assert find_pass("greedy_head")(model) == 0
    assert structure(model) == once

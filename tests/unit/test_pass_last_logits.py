"""last_logits: the LM head sees the last real tokens only."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from support.onnx_text import graph, random, run, structure

from onnxlm.export.passes import find_pass

VOCAB, HIDDEN = 7, 4
TABLE, HEAD = random(VOCAB, HIDDEN), random(VOCAB, HIDDEN, seed=1)
INPUTS = "int64[batch_size,sequence_length] input_ids, int64[batch_size,total_sequence_length] attention_mask"
LOGITS = f"float[batch_size,sequence_length,{VOCAB}] logits"
HEADS = {
    "fused": "logits = com.microsoft.FusedMatMul<transB=1>(h, head.weight)",
    "turned": "w = Transpose<perm=[1,0]>(head.weight)\nlogits = MatMul(h, w)",
    "scaled": "l = com.microsoft.FusedMatMul<transB=1>(h, head.weight)\nlogits = Mul(l, one)",
}


def head_graph(head: str = "fused") -> ir.Model:
    body = f"h = Gather(table, input_ids)\n{HEADS[head]}"
    weights = {"table": TABLE, "head.weight": HEAD}
    if head == "scaled":
        weights["one"] = np.ones(1, dtype=np.float32)
    return graph(INPUTS, LOGITS, body, weights)


def logits(model: ir.Model, ids: list, mask: list, keep: int | None = None) -> np.ndarray:
    feeds = {
        "input_ids": np.array(ids, dtype=np.int64),
        "attention_mask": np.array(mask, dtype=np.int64),
    }
    if keep is not None:
        feeds["num_logits_to_keep"] = np.array(keep, dtype=np.int64)
    return run(model, feeds)["logits"]


def expected(tokens: list[list[int]]) -> np.ndarray:
    """The head by hand: the model's hidden state is its token's row."""
    return TABLE[np.array(tokens)] @ HEAD.T


@pytest.mark.parametrize("head", HEADS)
def test_keeps_the_last_token_by_default(head: str) -> None:
    model = head_graph(head)
    assert find_pass("last_logits")(model) == 1
    actual = logits(model, [[1, 2, 3]], [[1, 1, 1]])
    np.testing.assert_allclose(actual, expected([[3]]), atol=1e-6)


def test_once_is_enough() -> None:
    model = head_graph()
    find_pass("last_logits")(model)
    once = structure(model)
    assert find_pass("last_logits")(model) == 0
    assert structure(model) == once


@pytest.mark.parametrize(
    ("mask", "keep", "tokens"),
    [
        ([[1, 1, 1, 1]], 1, [[4]]),
        ([[1, 1, 1, 1]], 4, [[1, 2, 3, 4]]),
        ([[1, 1, 1, 0]], 2, [[2, 3]]),  # padded on the right
        ([[0, 1, 1, 1]], 2, [[3, 4]]),  # padded on the left
        ([[0, 1, 1, 0]], 2, [[2, 3]]),  # on both sides
        ([[1, 0, 1, 1, 1, 0]], 1, [[3]]),  # behind two cached columns, one of them a hole
        ([[0, 0, 0, 1, 0, 0, 0]], 1, [[1]]),
        ([[1, 1, 0, 0]], 3, [[1, 1, 2]]),  # fewer than asked for: the first is repeated
        ([[1, 1, 1, 1]], 6, [[1, 1, 1, 2, 3, 4]]),
    ],
)
def test_last_real_tokens(mask: list, keep: int, tokens: list) -> None:
    model = head_graph()
    find_pass("last_logits")(model)
    actual = logits(model, [[1, 2, 3, 4]], mask, keep)
    np.testing.assert_allclose(actual, expected(tokens), atol=1e-6)


def test_every_row_has_its_own_last_token() -> None:
    model = head_graph()
    find_pass("last_logits")(model)
    ids = [[1, 2, 3], [4, 5, 6], [6, 1, 0]]
    mask = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
    np.testing.assert_allclose(logits(model, ids, mask), expected([[3], [4], [1]]), atol=1e-6)


def test_declares_an_optional_input() -> None:
    model = head_graph()
    find_pass("last_logits")(model)
    keep = model.graph.inputs[-1]
    assert (keep.name, keep.dtype, keep.is_initializer()) == (
        "num_logits_to_keep",
        ir.DataType.INT64,
        True,
    )
    assert [str(dim) for dim in model.graph.outputs[0].shape or ()] == [
        "batch_size",
        "num_logits_to_keep",
        str(VOCAB),
    ]
    assert {"table", "head.weight"} <= set(model.graph.initializers)

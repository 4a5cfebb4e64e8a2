"""window_cache: attention over a cache that has lost what its window does not see."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from support.onnx_text import graph, random, run

from onnxlm.export.passes import find_pass

WINDOW, WIDTH, NEW = 3, 8, 2
BODY = f"""
y, key, value = com.microsoft.GroupQueryAttention<
    num_heads=1, kv_num_heads=1, local_window_size={WINDOW}>
    (q, k, v, pk, pv, n, t, , , , , , , , , , s)
"""
LENGTHS = np.array([9, 5], dtype=np.int32)  # cached tokens of two rows


def attention(past: str = "window_past_length") -> ir.Model:
    cache = f"float[batch_size,1,{past},8]"
    inputs = (
        "float[batch_size,S,8] q, float[batch_size,S,8] k, float[batch_size,S,8] v,"
        f"{cache} pk, {cache} pv, int32[batch_size] n, int32 t, int32[batch_size] s"
    )
    grown = "float[batch_size,1,grown,8]"
    return graph(inputs, f"float[batch_size,S,8] y, {grown} key, {grown} value", BODY, {})


def feeds() -> dict[str, NDArray[np.generic]]:
    total = int(LENGTHS.max()) + NEW
    caches = {name: random(2, 1, total, WIDTH) for name in ("pk", "pv")}
    new = {name: random(2, NEW, WIDTH) for name in ("q", "k", "v")}
    counts = {"n": LENGTHS + NEW - 1, "s": np.full(2, NEW, np.int32)}
    return {**new, **caches, **counts, "t": np.array(total, np.int32)}


def by_hand(given: dict[str, NDArray[np.generic]], row: int) -> NDArray[np.float64]:
    """[NEW, WIDTH] of one row."""
    length = LENGTHS[row]
    keys, values = (
        np.concatenate((given[past][row, 0, :length], given[new][row]))
        for past, new in (("pk", "k"), ("pv", "v"))
    )
    found = []
    for step in range(NEW):
        seen = slice(length + step + 1 - WINDOW, length + step + 1)
        shares = np.exp(keys[seen].astype(np.float64) @ given["q"][row, step] / WIDTH**0.5)
        found.append(shares / shares.sum() @ values[seen])
    return np.stack(found)


@pytest.mark.parametrize("gone", [(0, 0), (7, 0), (7, 3), (4, 1)])
def test_what_is_gone_is_not_missed(gone: tuple[int, int]) -> None:
    model = attention()
    assert find_pass("window_cache")(model) == 1
    whole = feeds()
    short = dict(whole)
    for name in ("pk", "pv"):
        held = np.full((2, 1, LENGTHS.max() + NEW - min(gone), WIDTH), np.nan, np.float32)
        for row, count in enumerate(gone):
            kept = whole[name][row, :, count : LENGTHS[row]]
            held[row, :, : kept.shape[1]] = kept
        short[name] = held
    short["num_evicted_tokens"] = np.array(gone, dtype=np.int64)[:, None]
    for given in (whole, short):
        found = run(model, given)["y"]
        for row in range(2):
            np.testing.assert_allclose(found[row], by_hand(whole, row), atol=1e-5)


def test_other_caches_are_left_alone() -> None:
    model = attention("past_sequence_length")
    assert find_pass("window_cache")(model) == 0
    assert "num_evicted_tokens" not in {value.name for value in model.graph.inputs}


def test_it_is_not_done_twice() -> None:
    model = attention()
    assert [find_pass("window_cache")(model) for _ in range(2)] == [1, 0]

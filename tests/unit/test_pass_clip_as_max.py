"""clip_as_max: Clip(x, least) -> Max(x, least)."""

from __future__ import annotations

import numpy as np
import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, operators

FEEDS = {"x": np.arange(-6, 6, dtype=np.int64).reshape(2, 6)}
LEAST, MOST = "low = Constant<value = int64 {-2}>()", "high = Constant<value = int64 {3}>()"


@pytest.mark.parametrize("call", ["Clip(x, low)", "Clip(x, low, )"])
def test_fires(call: str) -> None:
    model = graph("int64[B,S] x", "int64[B,S] y", f"{LEAST}\ny = {call}", {})
    assert_fires("clip_as_max", model, FEEDS)
    assert operators(model) == ["Constant", "Max"]


NEAR_MISSES = {
    "both bounds": f"{LEAST}\n{MOST}\ny = Clip(x, low, high)",
    "no bound": "y = Clip(x)",
    "a largest value only": f"{MOST}\ny = Clip(x, , high)",
    "another operator": f"{LEAST}\ny = Min(x, low)",
}


@pytest.mark.parametrize("body", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_misses(body: str) -> None:
    assert_leaves_alone("clip_as_max", graph("int64[B,S] x", "int64[B,S] y", body, {}), FEEDS)

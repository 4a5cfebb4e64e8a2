"""rotary_scale: the factor of attention scores goes into the tables of cosines and sines."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.onnx_text import assert_fires, assert_leaves_alone, graph, random, run

from onnxlm.export.passes import find_pass

WIDTH, POSITIONS = 32, 8
PLAIN = "num_heads=2, kv_num_heads=1, do_rotary=1, scale=0.25"
NEW = "float[B,S,64] q, float[B,S,32] k, float[B,S,32] v, int32[B] n, int32 t"
CACHES = "float[B,1,P,32] pk, float[B,1,P,32] pv"
INPUTS = f"{NEW}, {CACHES}"
OUTPUTS = "float[B,S,64] y, float[B,1,T,32] key, float[B,1,T,32] value"
BODY = "y, key, value = com.microsoft.GroupQueryAttention<{}>(q, k, v, pk, pv, n, t, {})"


def attention(
    attributes: str = PLAIN,
    tables: str = "cos, sin",
    columns: int = WIDTH // 2,
    dtype: str = "float32",
    read: str = "",
    outputs: str = OUTPUTS,
) -> ir.Model:
    """One layer; `read` is a cache, past or present, that something else reads as well."""
    angles = np.arange(POSITIONS)[:, None] * 0.1 ** np.arange(columns)
    weights = {"cos": np.cos(angles).astype(dtype), "sin": np.sin(angles).astype(dtype)}
    body = BODY.format(attributes, tables)
    if read:
        body, outputs = f"{body} other = Neg({read})", f"{outputs}, float[B,1,R,32] other"
    kind = "float16" if dtype == "float16" else "float"
    inputs, outputs = INPUTS.replace("float", kind), outputs.replace("float", kind)
    return graph(inputs, outputs, body, weights)


def feeds(new: int = 1, dtype: str = "float32") -> dict[str, Any]:
    shapes = {"q": (1, new, 64), "k": (1, new, 32), "v": (1, new, 32)}
    given = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    # No keys yet: those of a cache that another graph has filled would have no factor.
    none = np.zeros((1, 1, 0, WIDTH), dtype=np.float32)
    counts = {"n": np.array([new - 1], np.int32), "t": np.array(new, np.int32)}
    given |= {"pk": none, "pv": none}
    return {name: value.astype(dtype) for name, value in given.items()} | counts


@pytest.mark.parametrize("attributes", [PLAIN, PLAIN.removesuffix(", scale=0.25")])
def test_scores_are_what_they_were(attributes: str) -> None:
    model = attention(attributes, outputs="float[B,S,64] y")
    assert_fires("rotary_scale", model, feeds(new=3))


def test_keys_carry_the_root() -> None:
    """By hand: a key at position 0 is not turned, so it is the key times sqrt(0.25)."""
    model, given = attention(), feeds()
    assert find_pass("rotary_scale")(model) == 1
    np.testing.assert_allclose(run(model, given)["key"][0, 0, 0], given["k"][0, 0] / 2, rtol=1e-6)


def test_layers_share_tables() -> None:
    second = BODY.format(PLAIN, "cos, sin")
    for name in ("y", "key", "value"):
        second = second.replace(f"{name},", f"{name}2,").replace(f"{name} =", f"{name}2 =")
    second = second.replace("pk, pv", "pk2, pv2")
    angles = random(POSITIONS, WIDTH // 2)
    caches = f"{CACHES}, {CACHES.replace('pk', 'pk2').replace('pv', 'pv2')}"
    more = OUTPUTS.replace(" y", " y2").replace(" key", " key2").replace(" value", " value2")
    model = graph(
        f"{NEW}, {caches}",
        f"{OUTPUTS}, {more}",
        BODY.format(PLAIN, "cos, sin") + second,
        {"cos": angles, "sin": angles},
    )
    assert find_pass("rotary_scale")(model) == 2
    assert len(model.graph.initializers) == 2


@pytest.mark.parametrize(
    ("changed", "dtype"),
    [
        pytest.param({"attributes": PLAIN.replace("0.25", "1.0")}, "float32", id="no factor"),
        pytest.param(
            {"attributes": PLAIN.replace("do_rotary=1", "do_rotary=0"), "tables": ", "},
            "float32",
            id="no rotation",
        ),
        pytest.param({"columns": WIDTH // 4}, "float32", id="a part is not turned"),
        pytest.param({"dtype": "float16"}, "float16", id="fp16"),
        pytest.param({"read": "key"}, "float32", id="what it keeps is read elsewhere"),
        pytest.param({"read": "pk"}, "float32", id="what it has kept is read elsewhere"),
    ],
)
def test_leaves_alone(changed: dict[str, Any], dtype: str) -> None:
    assert_leaves_alone("rotary_scale", attention(**changed), feeds(dtype=dtype))

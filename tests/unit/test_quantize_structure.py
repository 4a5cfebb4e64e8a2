"""Which parameters make the channels of a linear input, and where nothing may be scaled."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from support.onnx_text import graph, random

from onnxlm.quantize.structure import Origin, Rows, embeddings, head_weight, linear_inputs

H = 16  # hidden size
X = f"float[B,S,{H}] x"
Y = f"float[B,S,{H}] y"
W = {"w.weight": random(H, H)}
DOWN = "y = com.microsoft.FusedMatMul <transB=1> (h, w.weight)"


def origin(model: ir.Model, name: str = "h") -> Origin | None:
    """Of the linear input `name`."""
    (found,) = [item for item in linear_inputs(model.graph) if item.name == name]
    return found.origin


def norm(body: str, **more: str) -> ir.Model:
    """A norm `h`, whose weight is g and whose bias is b, in front of a linear."""
    weights = {**W, "g": random(H), "b": random(H)}
    return graph(f"{X}, float[B,S,{H}] skip", more.get("outputs", Y), f"{body}\n{DOWN}", weights)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("h = RMSNormalization (x, g)", ["g"]),
        ("h = LayerNormalization (x, g, b)", ["g", "b"]),
        ("h = LayerNormalization (x, g)", ["g"]),
        ("h = com.microsoft.SkipSimplifiedLayerNormalization (x, skip, g)", ["g"]),
        # Its last input is added before the norm.
        ("h = com.microsoft.SkipSimplifiedLayerNormalization (x, skip, g, b)", ["g"]),
        ("h = com.microsoft.SkipLayerNormalization (x, skip, g, b)", ["g", "b"]),
    ],
)
def test_a_norm_is_scaled_by_its_weight_and_bias(body: str, names: list[str]) -> None:
    assert origin(norm(body)) == Origin(tuple(Rows(name, 0, H) for name in names))


@pytest.mark.parametrize(
    "body",
    [
        "h = RMSNormalization (x, g)\nz = Relu (h)",  # something else reads what the norm makes
        "h = RMSNormalization (x, g)\nz = RMSNormalization (skip, g)",  # its weight
        "h = LayerNormalization (x, g, b)\nz = Add (x, b)",  # its bias
        "h = RMSNormalization (x, skip)\nz = Relu (x)",  # its weight is no stored one
        "z, m, v, h = com.microsoft.SkipSimplifiedLayerNormalization (x, skip, g)",  # the sum
    ],
)
def test_a_norm_with_other_readers_is_left_alone(body: str) -> None:
    model = norm(body, outputs=f"{Y}, float[B,S,{H}] z")
    assert origin(model) is None


def test_a_linear_input_that_is_an_output_is_left_alone() -> None:
    model = norm("h = RMSNormalization (x, g)", outputs=f"{Y}, float[B,S,{H}] h")
    assert origin(model) is None


def test_a_tied_head_keeps_its_norm() -> None:
    body = f"e = Gather (w.weight, input_ids)\nh = RMSNormalization (e, g)\n{DOWN}"
    weights = {"w.weight": random(40, H), "g": random(H)}
    model = graph("int64[B,S] input_ids", "float[B,S,40] y", body, weights)
    assert origin(model) is None


HEADS, KV_HEADS, WIDTH = 4, 2, 8
QKV = (HEADS + 2 * KV_HEADS) * WIDTH
PAST = f"float[B,{KV_HEADS},P,{WIDTH}] pk, float[B,{KV_HEADS},P,{WIDTH}] pv"
SIZES = "int32[B] last, int32 total"
ATTENTION = f"GroupQueryAttention <num_heads={HEADS},kv_num_heads={KV_HEADS}>"
O_PROJ = {"w.weight": random(H, HEADS * WIDTH)}


def attention(body: str, outputs: str = Y, **shapes: tuple[int, ...]) -> ir.Model:
    weights = {name: random(*shape) for name, shape in shapes.items()}
    return graph(
        f"{X}, {PAST}, {SIZES}", outputs, f"{body}\n{DOWN}", O_PROJ | {"b": random(QKV)} | weights
    )


VALUE_ROWS = ((HEADS + KV_HEADS) * WIDTH, QKV)
PACKED = "p = com.microsoft.FusedMatMul <transB=1> (x, qkv)\n"
PACKED_ATTENTION = f"h, k, v = com.microsoft.{ATTENTION} (q, , , pk, pv, last, total)"


def test_attention_is_scaled_by_the_rows_of_packed_values() -> None:
    model = attention(f"{PACKED}q = Identity (p)\n{PACKED_ATTENTION}", qkv=(QKV, H))
    assert origin(model) is None  # through an unknown operator
    model = attention(PACKED + PACKED_ATTENTION.replace("(q", "(p"), qkv=(QKV, H))
    heads = (HEADS, KV_HEADS, WIDTH)
    assert origin(model) == Origin((Rows("qkv", *VALUE_ROWS),), heads)


def test_attention_is_scaled_by_the_values_biases_too() -> None:
    model = attention(f"{PACKED}q = Add (p, b)\n{PACKED_ATTENTION}", qkv=(QKV, H))
    found = origin(model)
    assert found is not None
    assert found.rows == (Rows("qkv", *VALUE_ROWS), Rows("b", *VALUE_ROWS))


SEPARATE = """q = com.microsoft.FusedMatMul <transB=1> (x, wq)
k = com.microsoft.FusedMatMul <transB=1> (x, wk)
v = com.microsoft.FusedMatMul <transB=1> (x, wv)
"""
SHAPES = {"wq": (HEADS * WIDTH, H), "wk": (KV_HEADS * WIDTH, H), "wv": (KV_HEADS * WIDTH, H)}


@pytest.mark.parametrize(
    ("inputs", "rows"),
    [
        ("q, k, v", (Rows("wv", 0, KV_HEADS * WIDTH),)),
        ("q, v, v", None),  # keys that are the values would be scaled with them
    ],
)
def test_attention_is_scaled_by_a_value_layer_of_its_own(
    inputs: str, rows: tuple[Rows, ...] | None
) -> None:
    body = f"{SEPARATE}h, pk1, pv1 = com.microsoft.{ATTENTION} ({inputs}, pk, pv, last, total)"
    found = origin(attention(body, **SHAPES))
    assert (found and found.rows) == rows


def test_values_that_a_later_layer_attends_to_are_left_alone() -> None:
    body = f"{SEPARATE}h, pk1, pv1 = com.microsoft.{ATTENTION} (q, k, v, pk, pv, last, total)"
    model = attention(f"{body}\nz = Relu (pv1)", f"{Y}, float[B,{KV_HEADS},T,{WIDTH}] z", **SHAPES)
    assert origin(model) is None


GATE = "g = com.microsoft.FusedMatMul <transB=1> (x, gate)\na = com.microsoft.QuickGelu (g)\n"
UP = "u = com.microsoft.FusedMatMul <transB=1> (x, up)\n"
MERGED = "m = com.microsoft.FusedMatMul <transB=1> (x, both)\n"


def mlp(body: str, outputs: str = Y) -> ir.Model:
    weights = {
        **W,
        "gate": random(H, H),
        "up": random(H, H),
        "both": random(2 * H, H),
        "column": random(1, H),
        "bias": random(H),
        "biases": random(2 * H),
    }
    sizes = {"sizes": ir.tensor([H, H]).numpy()}
    return graph(X, outputs, f"{body}\n{DOWN}", weights | sizes)


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (f"{GATE}{UP}h = Mul (a, u)", [Rows("up", 0, H)]),
        (f"{GATE}{UP}h = Mul (u, a)", [Rows("up", 0, H)]),
        (f"{GATE}{UP}s = Add (bias, u)\nh = Mul (a, s)", [Rows("up", 0, H), Rows("bias", 0, H)]),
        (
            f"{MERGED}g, u = Split <axis=-1> (m, sizes)\na = Tanh (g)\nh = Mul (a, u)",
            [Rows("both", H, 2 * H)],
        ),
        (
            f"{MERGED}u, g = Split <axis=-1> (m, sizes)\na = Tanh (g)\nh = Mul (a, u)",
            [Rows("both", 0, H)],
        ),
        (
            f"{MERGED}n = Add (m, biases)\ng, u = Split <axis=-1> (n, sizes)\n"
            "a = Tanh (g)\nh = Mul (a, u)",
            [Rows("both", H, 2 * H), Rows("biases", H, 2 * H)],
        ),
    ],
)
def test_a_gated_layer_is_scaled_by_the_rows_of_its_plain_factor(
    body: str, rows: list[Rows]
) -> None:
    assert origin(mlp(body)) == Origin(tuple(rows))


@pytest.mark.parametrize(
    "body",
    [
        f"{UP}h = Mul (u, u)",  # scaled twice
        f"{GATE}h = Mul (g, a)",  # what is scaled is activated too
        f"{MERGED}g, u = Split <axis=-1> (m, sizes)\nh = Mul (u, u)",
        f"{GATE}c = com.microsoft.FusedMatMul <transB=1> (x, column)\nh = Mul (a, c)",  # one column for all
        f"{GATE}h = Mul (a, bias)",
        f"{GATE}{UP}t = Tanh (u)\nh = Mul (a, t)",
        f"{GATE}{UP}r = Relu (bias)\ns = Add (u, bias)\nh0 = Mul (a, s)\nh = Add (h0, r)",
        f"{GATE}{UP}n = com.microsoft.FusedMatMul <transB=1> (a, up)\nr = Relu (n)\n"
        "h1 = Mul (a, u)\nh = Add (h1, r)",
    ],
)
def test_factors_with_other_readers_are_left_alone(body: str) -> None:
    assert origin(mlp(body)) is None


def test_a_shared_layer_is_left_alone() -> None:
    body = (
        f"{GATE}{UP}n = com.microsoft.FusedMatMul <transB=1> (a, up)\nh = Mul (a, u)\nz = Relu (n)"
    )
    assert origin(mlp(body, f"{Y}, float[B,S,{H}] z")) is None


def test_a_bias_with_another_reader_is_left_alone() -> None:
    body = f"{GATE}{UP}s = Add (u, bias)\nh = Mul (a, s)\nz = Add (x, bias)"
    assert origin(mlp(body, f"{Y}, float[B,S,{H}] z")) is None


def test_readers_of_one_value_are_one_input() -> None:
    (item,) = linear_inputs(
        graph(
            X,
            f"{Y}, float[B,S,{H}] z",
            "y = com.microsoft.FusedMatMul <transB=1> (x, w.weight)\nz = MatMul (x, v.weight)",
            {**W, "v.weight": random(H, H, seed=1)},
        ).graph
    )
    assert [linear.name for linear in item.linears] == ["w.weight", "v.weight"]
    assert (item.name, item.origin) == ("x", None)


def test_an_embedding_is_read_by_tokens() -> None:
    body = """a = Gather (token.weight, input_ids)
        b = Gather (position.weight, positions)
        c = Gather <axis=1> (other.weight, input_ids)
        d = Add (a, b)"""
    model = graph(
        "int64[B,S] input_ids, int64[B,S] positions",
        f"float[B,S,{H}] d, float[{H},B,S] c",
        body,
        {name: random(H, H) for name in ("token.weight", "position.weight", "other.weight")},
    )
    (node,) = embeddings(model.graph)
    assert node.inputs[0] is model.graph.initializers["token.weight"]


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ("logits = Identity (l)", "head.weight"),
        ("logits = Add (l, bias)", "head.weight"),
        ("s = Div (l, cap)\nt = Tanh (s)\nlogits = Mul (cap, t)", "head.weight"),
        ("logits = MatMul (x, x)", None),
    ],
)
def test_the_head_makes_the_logits(behind: str, expected: str | None) -> None:
    body = "h = MatMul (x, w.weight)\nl = MatMul (h, head.weight)\n" + behind
    weights = {**W, "head.weight": random(H, H), "bias": random(H), "cap": random()}
    model = graph(f"float[{H},{H}] x", f"float[{H},{H}] logits", body, weights)
    assert head_weight(model.graph) == expected


def test_without_logits_there_is_no_head() -> None:
    model = graph(X, Y, "y = MatMul (x, w.weight)", W)
    assert head_weight(model.graph) is None

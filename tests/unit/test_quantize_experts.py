"""One layer of experts, lowered and quantized as packages are, against sums by hand of what its codes mean.

Legend of shapes: T tokens, E experts, k experts a token, K hidden size, N inner size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from support.onnx_text import random, run
from support.quantized import stored_experts
from torch import Tensor, nn
from torch._decomp import decomposition_table

from onnxlm.export.lowerings import find_lowering
from onnxlm.graphs.edit import drop_unused
from onnxlm.models.layers.experts import GateSpec
from onnxlm.models.layers.moe import Experts, SoftmaxRouter
from onnxlm.quantize.experts import expert_codes, given_experts
from onnxlm.quantize.rewrite import Rewriter
from onnxlm.quantized_tensor import QuantizedTensor

TOKENS, EXPERTS, TOP, HIDDEN, INNER = 7, 5, 2, 64, 32
BLOCK = 16
PLAIN, CLAMPED = GateSpec(), GateSpec(alpha=1.702, shift=1.0, limit=1.5)
Doubles = NDArray[np.float64]
Make = Callable[[str], QuantizedTensor]


class Layer(nn.Module):
    """Experts behind a router that says what it is given."""

    def __init__(self, normalize: bool, spec: GateSpec) -> None:
        super().__init__()
        self.router = SoftmaxRouter(HIDDEN, EXPERTS, TOP, normalize)
        self.router.gate = nn.Identity()
        self.experts = Experts(HIDDEN, INNER, EXPERTS, spec, bias=True)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.experts(x, self.router(logits))


def lowered(layer: Layer) -> ir.Model:
    """The layer as a graph with MoE."""
    lowering = find_lowering("ort")
    sample = torch.zeros(1, TOKENS, HIDDEN), torch.zeros(1, TOKENS, EXPERTS)
    program = torch.export.export(layer, sample, strict=False)
    with mock.patch.dict(decomposition_table, lowering.decompositions):
        exported = torch.onnx.export(
            program, (), dynamo=True, opset_version=lowering.opset, optimize=False, verbose=False
        )
    assert exported is not None
    model: ir.Model = exported.model
    return model


def quantized(model: ir.Model, codes: Mapping[str, QuantizedTensor], level: int) -> ir.Model:
    """The graph with QMoE, at an accuracy level."""
    assert set(codes) == {"experts.gate_up", "experts.down"}
    Rewriter({}, "ort", codes).rewrite(model.graph)
    drop_unused(model)
    (node,) = (node for node in model.graph if node.op_type == "QMoE")
    assert node.attributes["accuracy_level"].as_int() == 4
    node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)
    return model


def distinct_logits() -> NDArray[np.float32]:
    """[T, E] in which the experts' order is plain: 0.8 and more between neighbours."""
    rng = np.random.default_rng(3)
    ranks = np.array([rng.permutation(EXPERTS) for _ in range(TOKENS)])
    return (ranks + rng.uniform(-0.1, 0.1, ranks.shape)).astype(np.float32)


def rounded(values: Doubles, size: int) -> tuple[Doubles, Doubles]:
    """Values to 255 levels of the range of each `size`; how far off a level may be where two are as near.

    A value this close to the middle between two levels may fall on either side of it in float32.
    """
    blocks = values.reshape(-1, size)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    levels = blocks / step
    undecided = np.abs(np.abs(levels - np.rint(levels)) - 0.5) < 1e-3
    return (np.rint(levels) * step).reshape(values.shape), (undecided * step).reshape(values.shape)


def expert_by_hand(
    x: Doubles, weights: dict[str, Doubles], spec: GateSpec, rounds: int
) -> tuple[Doubles, Doubles]:
    """One expert on one token [K], and how far the kernel's outcome may be from it.

    Args:
        x: The token.
        weights: Of the expert.
        spec: The activation.
        rounds: Values that are rounded by one range; 0 where none are.
    """
    slack = np.zeros(INNER)
    if rounds:
        x, _ = rounded(x, rounds)
    rows = weights["gate_up"] @ x + weights["gate_up_bias"]
    gate, up = rows[0::2], rows[1::2]
    if spec.limit:
        gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
    inner = gate / (1 + np.exp(-spec.alpha * gate)) * (up + spec.shift)
    if rounds:
        inner, slack = rounded(inner, rounds)
    y = weights["down"] @ inner + weights["down_bias"]
    return y, np.abs(weights["down"]) @ slack


def by_hand(
    graph: ir.Graph, x: Doubles, logits: Doubles, layer: Layer, rounds: int
) -> tuple[Doubles, Doubles]:
    """Outcome [T, K] of all tokens, and how far the kernel's may be from it."""
    held: dict[str, Any] = {
        **{name: stored_experts(graph, f"experts.{name}") for name in ("gate_up", "down")},
        "gate_up_bias": layer.experts.gate_up_bias.detach().numpy(),
        "down_bias": layer.experts.down_bias.detach().numpy(),
    }
    y, slack = np.zeros_like(x), np.zeros_like(x)
    for token in range(TOKENS):
        chosen = np.argsort(-logits[token])[:TOP]
        sizes = np.exp(logits[token])
        whole = sizes[chosen].sum() if layer.router.normalize else sizes.sum()
        for expert in chosen:
            weights = {name: np.float64(values[expert]) for name, values in held.items()}
            outcome, off = expert_by_hand(x[token], weights, layer.experts.spec, rounds)
            y[token] += sizes[expert] / whole * outcome
            slack[token] += sizes[expert] / whole * off
    return y, slack


def random_layer(normalize: bool, spec: GateSpec) -> Layer:
    layer = Layer(normalize, spec)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.from_numpy(random(*parameter.shape, seed=seed) * 0.3))
    return layer


def assert_computes(model: ir.Model, layer: Layer, rounds: int) -> None:
    """The graph's outcome is that of its codes, by hand."""
    x, logits = random(1, TOKENS, HIDDEN, seed=9), distinct_logits()[None]
    names = [value.name for value in model.graph.inputs]
    for optimized in (False, True):
        (actual,) = run(model, dict(zip(names, (x, logits), strict=True)), optimized).values()
        expected, slack = by_hand(
            model.graph, np.float64(x[0]), np.float64(logits[0]), layer, rounds
        )
        bound = 1e-4 * max(1.0, np.abs(expected).max())
        assert (np.abs(actual[0] - expected) <= bound + slack).all()
        # Another expert in the place of a chosen one is far outside.
        wrong, _ = by_hand(model.graph, np.float64(x[0]), -np.float64(logits[0]), layer, rounds)
        assert (np.abs(wrong - expected).max(axis=1) > 100 * bound + slack.max(axis=1)).all()


# 8 bits round activations at every level, 4 bits at the level of packages.
@pytest.mark.parametrize(
    ("bits", "level", "rounds"), [(4, 1, 0), (4, 4, BLOCK), (8, 1, BLOCK), (8, 4, BLOCK)]
)
@pytest.mark.parametrize("spec", [PLAIN, CLAMPED], ids=["plain", "clamped"])
@pytest.mark.parametrize("normalize", [True, False])
def test_chosen_experts_compute_with_their_codes(
    normalize: bool, spec: GateSpec, bits: int, level: int, rounds: int
) -> None:
    layer = random_layer(normalize, spec)
    model = lowered(layer)
    codes = expert_codes(model.graph, bits, BLOCK, {})
    assert_computes(quantized(model, codes, level), layer, rounds)


ROWS = {"experts.gate_up": (EXPERTS * 2 * INNER, HIDDEN), "experts.down": (EXPERTS * HIDDEN, INNER)}


def mxfp4(name: str, size: int = 32) -> QuantizedTensor:
    """Codes of a checkpoint: E2M1 numbers, each block with a power of two of its own."""
    (rows, columns), rng = ROWS[name], np.random.default_rng(len(name))
    codes = (
        rng.choice([-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12], (rows, columns)) + 128
    )
    scale = np.ldexp(np.float32(1), rng.integers(-9, -4, (rows, columns // size)))
    return QuantizedTensor(8, size, codes.astype(np.uint8), scale)


def four_bits(name: str, size: int = 32) -> QuantizedTensor:
    """Codes of a checkpoint: all that four bits hold, scales of both signs."""
    (rows, columns), rng = ROWS[name], np.random.default_rng(len(name))
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    scale = rng.standard_normal((rows, columns // size)).astype(np.float32) * 0.05
    return QuantizedTensor(4, size, codes, scale)


def affine(name: str) -> QuantizedTensor:
    """Codes that QMoE does not hold: a block has an offset."""
    tensor = four_bits(name)
    return dataclasses.replace(tensor, offset=tensor.scale)


@pytest.mark.parametrize(
    ("gate_up", "down", "bits", "size"),
    [
        (mxfp4, mxfp4, 8, 32),
        (four_bits, four_bits, 4, 32),
        # Both weights have codes of one form.
        (four_bits, mxfp4, 8, 32),
        (mxfp4, functools.partial(four_bits, size=16), 8, 16),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_given_codes_are_held_as_they_are(
    normalize: bool, gate_up: Make, down: Make, bits: int, size: int
) -> None:
    layer = random_layer(normalize, CLAMPED)
    model = lowered(layer)
    given = {"experts.gate_up": gate_up("experts.gate_up"), "experts.down": down("experts.down")}
    codes = expert_codes(model.graph, 8, BLOCK, given_experts(model.graph, given))
    model = quantized(model, codes, 4)
    for name, tensor in given.items():
        held = stored_experts(model.graph, name)
        assert held is not None
        np.testing.assert_array_equal(held.reshape(tensor.shape), tensor.dequantize())
    assert {(tensor.bits, tensor.block_size) for tensor in codes.values()} == {(bits, size)}
    assert_computes(model, layer, size)


@pytest.mark.parametrize(
    "given",
    [
        {"experts.gate_up": mxfp4},
        {"experts.gate_up": mxfp4, "experts.down": affine},
        {name: functools.partial(mxfp4, size=8) for name in ROWS},
        {name: lambda name: dataclasses.replace(mxfp4(name, 16), block_size=24) for name in ROWS},
    ],
    ids=["one of two", "an offset", "small blocks", "odd blocks"],
)
def test_what_qmoe_cannot_hold_is_rounded_anew(given: dict[str, Make]) -> None:
    graph = lowered(random_layer(True, PLAIN)).graph
    assert given_experts(graph, {name: make(name) for name, make in given.items()}) == {}

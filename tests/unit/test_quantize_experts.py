"""One layer of experts, lowered and quantized as packages are, against sums by hand of what its codes mean.

Legend of shapes: T tokens, E experts, k experts a token, K hidden size, N inner size.
"""

from __future__ import annotations

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
from onnxlm.quantize.experts import expert_codes
from onnxlm.quantize.rewrite import Rewriter

TOKENS, EXPERTS, TOP, HIDDEN, INNER = 7, 5, 2, 64, 32
BLOCK = 16
PLAIN, CLAMPED = GateSpec(), GateSpec(alpha=1.702, shift=1.0, limit=1.5)
Doubles = NDArray[np.float64]


class Layer(nn.Module):
    """Experts behind a router that says what it is given."""

    def __init__(self, normalize: bool, spec: GateSpec) -> None:
        super().__init__()
        self.router = SoftmaxRouter(HIDDEN, EXPERTS, TOP, normalize)
        self.router.gate = nn.Identity()
        self.experts = Experts(HIDDEN, INNER, EXPERTS, spec, bias=True)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.experts(x, self.router(logits))


def quantized(layer: Layer, bits: int, level: int) -> ir.Model:
    """The layer as a graph with QMoE, at an accuracy level."""
    lowering = find_lowering("ort")
    sample = torch.zeros(1, TOKENS, HIDDEN), torch.zeros(1, TOKENS, EXPERTS)
    program = torch.export.export(layer, sample, strict=False)
    with mock.patch.dict(decomposition_table, lowering.decompositions):
        exported = torch.onnx.export(
            program, (), dynamo=True, opset_version=lowering.opset, optimize=False, verbose=False
        )
    assert exported is not None
    model: ir.Model = exported.model
    codes = expert_codes(model.graph, bits, BLOCK)
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


def rounded(values: Doubles) -> tuple[Doubles, Doubles]:
    """Values to 255 levels of each block's range; how far off a level may be where two are as near.

    A value this close to the middle between two levels may fall on either side of it in float32.
    """
    blocks = values.reshape(-1, BLOCK)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    levels = blocks / step
    undecided = np.abs(np.abs(levels - np.rint(levels)) - 0.5) < 1e-3
    return (np.rint(levels) * step).reshape(values.shape), (undecided * step).reshape(values.shape)


def expert_by_hand(
    x: Doubles, weights: dict[str, Doubles], spec: GateSpec, rounds: bool
) -> tuple[Doubles, Doubles]:
    """One expert on one token [K], and how far the kernel's outcome may be from it."""
    slack = np.zeros(INNER)
    if rounds:
        x, _ = rounded(x)
    rows = weights["gate_up"] @ x + weights["gate_up_bias"]
    gate, up = rows[0::2], rows[1::2]
    if spec.limit:
        gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
    inner = gate / (1 + np.exp(-spec.alpha * gate)) * (up + spec.shift)
    if rounds:
        inner, slack = rounded(inner)
    y = weights["down"] @ inner + weights["down_bias"]
    return y, np.abs(weights["down"]) @ slack


def by_hand(
    graph: ir.Graph, x: Doubles, logits: Doubles, layer: Layer, rounds: bool
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


# 8 bits round activations at every level, 4 bits at the level of packages.
@pytest.mark.parametrize(
    ("bits", "level", "rounds"), [(4, 1, False), (4, 4, True), (8, 1, True), (8, 4, True)]
)
@pytest.mark.parametrize("spec", [PLAIN, CLAMPED], ids=["plain", "clamped"])
@pytest.mark.parametrize("normalize", [True, False])
def test_chosen_experts_compute_with_their_codes(
    normalize: bool, spec: GateSpec, bits: int, level: int, rounds: bool
) -> None:
    layer = Layer(normalize, spec)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.from_numpy(random(*parameter.shape, seed=seed) * 0.3))
    model = quantized(layer, bits, level)
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

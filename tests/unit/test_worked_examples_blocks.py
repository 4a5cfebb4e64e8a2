"""Norms, activations, feed-forward blocks and residual layers, worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onnxlm.models.layers.activation import ACTIVATIONS
from onnxlm.models.layers.decoder_layers import DecoderLayer, ParallelLayer, PostNormLayer
from onnxlm.models.layers.mlp import MLP, GatedMLP
from onnxlm.models.layers.norm import LayerNorm, RMSNorm

SPREAD = torch.tensor([0.001, 52.3, -0.0003, 18.7])


def test_layer_norm() -> None:
    """Mean 17.7502, variance 456.176, standard deviation 21.3583: 34.5498 / 21.3583 = 1.6176, and so on."""
    assert SPREAD.mean().item() == pytest.approx(17.7502, abs=5e-5)
    assert SPREAD.var(correction=0).item() == pytest.approx(456.176, abs=5e-4)
    normed = LayerNorm(4, 1e-5)(SPREAD)
    assert normed.tolist() == pytest.approx([-0.8310, 1.6176, -0.8311, 0.0445], abs=5e-5)


def test_layer_norm_scales_and_shifts() -> None:
    norm = LayerNorm(4, 1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 10.0, 100.0]))
        assert norm.bias is not None
        norm.bias.copy_(torch.tensor([0.0, 1.0, 0.0, -4.0]))
    expected = [-0.8310, 2 * 1.6176 + 1, -8.311, 4.45 - 4]
    assert norm(SPREAD).tolist() == pytest.approx(expected, abs=5e-3)


def test_a_norm_is_not_linear() -> None:
    """Twice the input is the same output: the deviation that is divided by doubles too."""
    norm = LayerNorm(4, 0.0)
    torch.testing.assert_close(norm(2 * SPREAD), norm(SPREAD))


def test_rms_norm_does_not_centre() -> None:
    """The mean square is (0.001^2 + 52.3^2 + 0.0003^2 + 18.7^2) / 4 = 771.245, its root 27.7713."""
    normed = RMSNorm(4, 1e-6)(SPREAD)
    expected = [0.001 / 27.7713, 52.3 / 27.7713, -0.0003 / 27.7713, 18.7 / 27.7713]
    assert normed.tolist() == pytest.approx(expected, rel=1e-5)
    assert normed.sum().item() > 2


def value_and_slope(name: str, at: float) -> tuple[float, float]:
    x = torch.tensor(at, requires_grad=True)
    y = ACTIVATIONS[name](x)
    (slope,) = torch.autograd.grad(y, x)
    return y.item(), slope.item()


@pytest.mark.parametrize(
    ("at", "value", "slope"),
    [(-2.0, 0.0, 0.0), (-0.1, 0.0, 0.0), (0.5, 0.5, 1.0), (3.0, 3.0, 1.0)],
)
def test_relu(at: float, value: float, slope: float) -> None:
    assert value_and_slope("relu", at) == (value, slope)


@pytest.mark.parametrize(
    ("at", "value", "slope"),
    [
        (-2.0, -0.0455, -0.0852),
        (-1.0, -0.1587, -0.0833),
        (0.0, 0.0, 0.5),
        (1.0, 0.8413, 1.0833),
    ],
)
def test_gelu(at: float, value: float, slope: float) -> None:
    """x times the normal distribution at x; its slope, below -0.75, is negative."""
    assert value_and_slope("gelu", at) == pytest.approx((value, slope), abs=5e-5)
    density = math.exp(-(at**2) / 2) / math.sqrt(2 * math.pi)
    distribution = (1 + math.erf(at / math.sqrt(2))) / 2
    exact = (at * distribution, distribution + at * density)
    assert value_and_slope("gelu", at) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("at", [-2.0, -1.0, 0.0, 1.0])
def test_gelu_by_a_hyperbolic_tangent(at: float) -> None:
    bent = 0.5 * at * (1 + math.tanh(math.sqrt(2 / math.pi) * (at + 0.044715 * at**3)))
    assert value_and_slope("gelu_new", at)[0] == pytest.approx(bent, abs=1e-6)
    assert value_and_slope("gelu", at)[0] == pytest.approx(bent, abs=5e-4)


@pytest.mark.parametrize("at", [-2.0, -1.0, 0.0, 1.0])
def test_swish(at: float) -> None:
    sigmoid = 1 / (1 + math.exp(-at))
    slope = sigmoid * (1 + at * (1 - sigmoid))
    assert value_and_slope("silu", at) == pytest.approx((at * sigmoid, slope), abs=1e-6)


def test_feed_forward_block() -> None:
    """max(0, x W1 + b1) W2 + b2 at x = 2: (1, -5) + (1, 2) = (2, -3), of which (2, 0) is left: 6 + 0.5."""
    block = MLP(1, 2, True, "relu")
    with torch.no_grad():
        block.up_proj.weight.copy_(torch.tensor([[0.5], [-2.5]]))
        block.up_proj.bias.copy_(torch.tensor([1.0, 2.0]))
        block.down_proj.weight.copy_(torch.tensor([[3.0, 7.0]]))
        block.down_proj.bias.copy_(torch.tensor([0.5]))
    assert block(torch.tensor([2.0])).item() == 6.5


def test_gated_block() -> None:
    """At x = 2: swish(2) * 6 + 10 * swish(-2) * 10 = 1.761594 * 6 - 0.238406 * 100."""
    block = GatedMLP(1, 2)
    with torch.no_grad():
        block.gate_proj.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        block.up_proj.weight.copy_(torch.tensor([[3.0], [5.0]]))
        block.down_proj.weight.copy_(torch.tensor([[1.0, 10.0]]))
    assert block(torch.tensor([2.0])).item() == pytest.approx(-13.271, abs=1e-3)


def test_every_position_by_itself() -> None:
    torch.manual_seed(0)
    block, x = GatedMLP(4, 8, activation="gelu"), torch.randn(3, 4)
    alone = torch.stack([block(row) for row in x])
    torch.testing.assert_close(block(x), alone)


class Times(nn.Module):
    """A branch that multiplies."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return (self.factor * x, rest[0]) if rest else self.factor * x


# (1, 5) less its mean, over its deviation, is (-1, 1).
PAIR = torch.tensor([1.0, 5.0])


def norms() -> tuple[LayerNorm, LayerNorm]:
    return LayerNorm(2, 0.0), LayerNorm(2, 0.0)


def test_norms_in_front() -> None:
    """(1, 5) + 3 * (-1, 1) = (-2, 8), and + 10 * (-1, 1) = (-12, 18)."""
    out, _ = DecoderLayer(Times(3.0), Times(10.0), *norms())(PAIR, (), None)
    assert out.tolist() == pytest.approx([-12.0, 18.0])


def test_norms_behind() -> None:
    """What leaves has mean 0 and deviation 1, whatever the branches add."""
    out, _ = PostNormLayer(Times(3.0), Times(10.0), *norms())(PAIR, (), None)
    assert out.tolist() == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, [1.0, -1.0]), (4.0, [-1.0, 1.0])])
def test_deep_norm_weighs_the_residual(alpha: float, expected: list[float]) -> None:
    """norm(alpha x - 3 x): 4 is where the residual outweighs the branch (Wang et al., 2022)."""
    out, _ = PostNormLayer(Times(-3.0), Times(0.0), *norms(), alpha=alpha)(PAIR, (), None)
    assert out.tolist() == pytest.approx(expected)


def test_branches_side_by_side() -> None:
    """x + 3 x + 10 x, where one behind the other would be (1 + 3)(1 + 10) x."""
    x = torch.tensor([2.0])
    parallel, _ = ParallelLayer(Times(3.0), Times(10.0), nn.Identity())(x, (), None)
    serial, _ = DecoderLayer(Times(3.0), Times(10.0), nn.Identity(), nn.Identity())(x, (), None)
    assert (parallel.item(), serial.item()) == (28.0, 88.0)


def test_residuals_carry_the_gradient() -> None:
    """80 branches that give back a hundredth: (1 + 0.01)^80, not 0.01^80."""
    layers = [
        DecoderLayer(Times(0.01), Times(0.0), nn.Identity(), nn.Identity()) for _ in range(80)
    ]
    x = torch.tensor([1.0], requires_grad=True)
    y = x
    for layer in layers:
        y, _ = layer(y, (), None)
    (slope,) = torch.autograd.grad(y, x)
    assert slope.item() == pytest.approx(1.01**80, rel=1e-5)

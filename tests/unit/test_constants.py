"""Constants around and inside the layers, norms that are stored as differences: values worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onnxlm.models.layers.decoder import DecoderLM, Scaling
from onnxlm.models.layers.decoder_layers import DecoderLayer
from onnxlm.models.layers.norm import HeadNorm, LayerNorm, RMSNorm
from onnxlm.models.weight_rules import Cut, raised


def logits(scaling: Scaling) -> list[float]:
    """Of token 1, whose embedding is (1, -2), by a head with the rows (3, 0) and (0, 1)."""
    embedding, head = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        embedding.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
        head.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    model = DecoderLM(embedding, [], None, head, scaling=scaling)
    values: list[float] = model(torch.tensor([[1]]), torch.ones((1, 1)), [])[0][0, 0].tolist()
    return values


def test_unscaled() -> None:
    assert logits(Scaling()) == [3.0, -2.0]


def test_embedding_and_logits_have_factors() -> None:
    assert logits(Scaling(embedding=4.0, logits=0.125)) == [1.5, -1.0]


def test_logits_are_capped_behind_their_factor() -> None:
    expected = [5 * math.tanh(1.5 / 5), 5 * math.tanh(-1.0 / 5)]
    assert logits(Scaling(4.0, 0.125, softcap=5.0)) == pytest.approx(expected)


class Times(nn.Module):
    """A branch that multiplies."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return (self.factor * x, rest[0]) if rest else self.factor * x


def test_both_branches_have_the_residual_factor() -> None:
    """x = 2: 2 + 0.5 * 3 * 2 = 5, then 5 + 0.5 * 10 * 5 = 30."""
    norms = (nn.Identity(), nn.Identity())
    layer = DecoderLayer(Times(3.0), Times(10.0), *norms, residual_multiplier=0.5)
    out, cache = layer(torch.tensor([2.0]), (), None)
    assert (out.item(), cache) == (30.0, ())


def test_rms_norm() -> None:
    """The mean square of (3, 4) is 12.5; an epsilon of 3.5 makes its root 4."""
    norm = RMSNorm(2, 3.5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, 10.0]))
    assert norm(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([1.5, 10.0])


def test_layer_norm_without_a_bias() -> None:
    """(1, 5) less its mean is (-2, 2); the variance 4 and an epsilon of 12 make 4."""
    norm = LayerNorm(2, 12.0, bias=False)
    assert norm(torch.tensor([1.0, 5.0])).tolist() == pytest.approx([-0.5, 0.5])


def test_head_norm_has_a_weight_for_each_head() -> None:
    norm = HeadNorm(2, 2, 12.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    heads = norm(torch.tensor([[1.0, 5.0], [5.0, 1.0]])).tolist()
    assert heads == [pytest.approx([-0.5, 1.0]), pytest.approx([2.0, -4.0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_difference_to_one_is_added_in_full_precision(dtype: torch.dtype) -> None:
    """1 + 2^-10 is no bfloat16: added in the stored type the weight would be 1."""
    rule = raised("norm.weight")
    assert isinstance(rule, Cut)
    (weight,) = rule.pieces(torch.tensor([2.0**-10, -0.5], dtype=dtype), None)
    assert weight.tolist() == [1 + 2.0**-10, 0.5]

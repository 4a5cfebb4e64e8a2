"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis.

    Source: Ba et al., "Layer Normalization" (2016), eq. 4.

    Args:
        size: Width of the last axis.
        eps: Added to the variance.
        bias: There is a bias.
        weight: There is a trained weight; ones otherwise.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, bias: bool = True, weight: bool = True) -> None:
        super().__init__()
        if weight:
            self.weight = nn.Parameter(torch.ones(size))
        else:  # a constant: real also in a module that is built on the meta device
            self.register_buffer("weight", torch.ones(size, device="cpu"), persistent=False)
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class HeadNorm(nn.Module):
    """A norm with a weight vector for each head: x [..., H, D], each head by itself.

    Args:
        heads: H.
        width: D.
        eps: Added to the variance.
    """

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H, D] -> [..., H, D]."""
        return nn.functional.layer_norm(x, x.shape[-1:], None, None, self.eps) * self.weight

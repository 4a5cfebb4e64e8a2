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

"""Positions that are added to the embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LearnedPositions(nn.Module):
    """A trained vector for each position.

    Args:
        max_positions: Positions, M.
        hidden_size: Width.
        offset: Rows of the table before the first position (OPT has 2).
    """

    def __init__(self, max_positions: int, hidden_size: int, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(max_positions + offset, hidden_size))
        self.offset = offset
        self.max_positions = max_positions

    def forward(self, position_ids: Tensor) -> Tensor:
        """int64 [B, S] -> [B, S, hidden_size]."""
        rows = position_ids + self.offset if self.offset else position_ids
        return nn.functional.embedding(rows, self.weight)


class SinusoidalPositions(nn.Module):
    """Sines on even widths, cosines on odd ones; low widths turn fast.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.5.
    """

    table: Tensor

    def __init__(self, max_positions: int, hidden_size: int, base: float = 10000.0) -> None:
        super().__init__()
        table = sinusoidal_table(max_positions, hidden_size, base)
        self.register_buffer("table", table, persistent=False)
        self.max_positions = max_positions

    def forward(self, position_ids: Tensor) -> Tensor:
        """int64 [B, S] -> [B, S, hidden_size]."""
        return nn.functional.embedding(position_ids, self.table)


def sinusoidal_table(max_positions: int, hidden_size: int, base: float = 10000.0) -> Tensor:
    """float32 [max_positions, hidden_size]: sin, cos of position / base^(2i / hidden_size), alternating."""
    count = torch.arange(max_positions, dtype=torch.float64, device="cpu")
    exponents = torch.arange(0, hidden_size, 2, dtype=torch.float64, device="cpu") / hidden_size
    angles = torch.outer(count, base**-exponents)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :hidden_size].float()

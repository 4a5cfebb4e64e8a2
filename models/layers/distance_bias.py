"""Scores that depend on how far back a token lies: ALiBi slopes, relative position buckets.

Legend of shapes: B rows, S new tokens a row, T columns, H heads, L distances that are told apart.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.library.custom_op("onnxlm::distance_bias", mutates_args=())
def distance_bias_op(table: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """Opaque node of a traced program; `export/lowerings` replaces it. See `distance_bias`."""
    return _reference(table, attention_mask, position_ids).contiguous()


@distance_bias_op.register_fake
def _shape_only(table: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    rows, new = position_ids.shape
    return table.new_empty((rows, table.shape[0], new, attention_mask.shape[1]))


def by_distance(table: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Look up a bias for every pair of positions; what lies ahead counts as distance 0, it is masked anyway.

    Args:
        table: [H, L].
        query_positions: int64 [B, S].
        key_positions: int64 [B, T], or [1, T] when all rows share them.

    Returns:
        [B, H, S, T].
    """
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    distance = distance.clamp(0, table.shape[1] - 1)
    return table[:, distance].transpose(0, 1)


def _reference(table: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    return by_distance(table, position_ids, attention_mask.cumsum(1) - 1)


def distance_bias(table: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """The bias of every new token towards every column.

    Args:
        table: [H, L], bias by distance; larger distances take the last.
        attention_mask: int64 [B, T], 1 for a real token.
        position_ids: int64 [B, S], position of each new token within its row.

    Returns:
        [B, H, S, T], for `cached_attention`.
    """
    if not torch.compiler.is_exporting():
        return _reference(table, attention_mask, position_ids)
    bias: Tensor = distance_bias_op(table, attention_mask, position_ids)
    return bias


def alibi_slopes(heads: int) -> Tensor:
    """One slope a head, float64 [H]: powers of 2^(-8/n) for n the power of two not above H, then between.

    Source: Press et al., "Train Short, Test Long" (2022), section 3 and its published code for other H.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes + between, dtype=torch.float64, device="cpu")


def alibi_table(heads: int, max_positions: int) -> Tensor:
    """Bias of ALiBi by distance, -slope * distance: float32 [H, max_positions]."""
    distances = torch.arange(max_positions, dtype=torch.float64, device="cpu")
    return torch.outer(alibi_slopes(heads), -distances).float()


def relative_buckets(num_buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance back, int64 [max_distance + 1]: exact up to half the buckets, then logarithmic.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning" (2020), section 2.1 and its code, for a
    decoder, which looks back only.
    """
    distances = torch.arange(max_distance + 1, device="cpu")
    exact = num_buckets // 2
    ratio = (distances.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return torch.where(distances < exact, distances, far)

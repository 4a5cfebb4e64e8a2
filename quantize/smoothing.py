"""Move activation outliers into the weights: the same function, at no cost when it runs.

A linear layer y = x @ W.T is also y = (x / s) @ (W * s).T for any positive s [K]. The division is
folded into whatever linear step made x: the weight of the norm before it, or the rows of the
projection before it. With s_j = max|x_j| ** a / max|w_j| ** (1 - a) the range of x that 8-bit
activations must cover shrinks.

Source: Xiao et al., "SmoothQuant" (2022).

    x is read by              folded into            through
    q_proj, k_proj, v_proj    the norm before them   `divide_rows`
    gate_proj, up_proj        the norm before them   `divide_rows`
    o_proj                    v_proj rows            `divide_rows`, one scale a group of query heads
    down_proj                 up_proj rows           `divide_rows`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onnxlm.errors import QuantizationError

Float = NDArray[np.float32]

# No channel moves further from the mean than this, so that one freak ratio cannot flush others.
_LARGEST_STEP = 1e3


def channel_max(weights: Sequence[Float]) -> Float:
    """max|w_j| [K] over the rows of all matrices [N, K] that read one input."""
    largest: Float = np.max([np.abs(w).max(axis=0) for w in weights], axis=0).astype(np.float32)
    return largest


def smoothing_scale(activation_max: Float, weight_max: Float, alpha: float) -> Float:
    """The scale s [K] that balances the ranges of activations and weights; geometric mean 1.

    A channel that is never active, or that nothing reads, gives no ratio and keeps 1.

    Args:
        activation_max: max|x_j| [K] over the calibration tokens.
        weight_max: max|w_j| [K] over every matrix that reads x.
        alpha: 0 evens out the weights, 1 the activations.

    Raises:
        QuantizationError: `alpha` is outside [0, 1].
    """
    if not 0.0 <= alpha <= 1.0:
        raise QuantizationError("smoothing strength alpha", found=alpha, allowed="0 to 1")
    used = (activation_max > 0) & (weight_max > 0)
    scale = np.ones(activation_max.shape, np.float64)
    if not used.any():
        return scale.astype(np.float32)
    log_scale = alpha * np.log(activation_max[used].astype(np.float64))
    log_scale -= (1.0 - alpha) * np.log(weight_max[used].astype(np.float64))
    log_scale -= log_scale.mean()
    limit = np.log(_LARGEST_STEP)
    scale[used] = np.exp(np.clip(log_scale, -limit, limit))
    return scale.astype(np.float32)


def group_max(per_channel: Float, num_kv_heads: int, head_dim: int) -> Float:
    """Max over the query heads that share a value head: [H * D] -> [Hkv * D].

    Query head h reads value head h // (H / Hkv).
    """
    grouped = per_channel.reshape(num_kv_heads, -1, head_dim)
    return np.ascontiguousarray(grouped.max(axis=1).reshape(-1))


def spread_to_heads(scale: Float, num_heads: int, head_dim: int) -> Float:
    """The inverse of `group_max` for a scale: [Hkv * D] -> [H * D]."""
    heads = scale.reshape(-1, head_dim)
    return np.ascontiguousarray(np.repeat(heads, num_heads // len(heads), axis=0).reshape(-1))


def multiply_columns(weight: Float, scale: Float) -> Float:
    """The reader of x: [N, K] * s [K]."""
    return weight * scale[None, :]


def divide_rows(weight: Float, scale: Float) -> Float:
    """What makes x: a weight [K, M] row by row, or a bias or norm weight [K], divided by s [K]."""
    return weight / (scale[:, None] if weight.ndim == 2 else scale)

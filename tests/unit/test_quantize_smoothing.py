"""Smoothing leaves the fp32 function as it is and evens out activation ranges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxlm.errors import QuantizationError
from onnxlm.quantize import smoothing

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def outliers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    values[..., rng.integers(shape[-1])] *= 100
    return values


def close(a: np.ndarray, b: np.ndarray) -> None:
    assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_norm_and_readers_keep_the_function(seed: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    x, norm = outliers(rng, 20, 48), outliers(rng, 48)
    readers = [outliers(rng, 24, 48), outliers(rng, 40, 48)]
    normed = rms_norm(x, norm)
    scale = smoothing.smoothing_scale(np.abs(normed).max(0), smoothing.channel_max(readers), alpha)
    smoothed = rms_norm(x, smoothing.divide_rows(norm, scale))
    for reader in readers:
        close(normed @ reader.T, smoothed @ smoothing.multiply_columns(reader, scale).T)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_value_rows_shared_by_query_heads_keep_the_function(seed: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    x, v_proj = outliers(rng, 20, 48), outliers(rng, KV_HEADS * HEAD_DIM, 48)
    bias = outliers(rng, KV_HEADS * HEAD_DIM)
    o_proj = outliers(rng, 48, HEADS * HEAD_DIM)
    mixing = rng.dirichlet(np.ones(20), (HEADS, 20)).astype(np.float32)

    def attend(v: np.ndarray) -> np.ndarray:
        values = v.reshape(20, KV_HEADS, HEAD_DIM).repeat(HEADS // KV_HEADS, axis=1)
        return np.einsum("hst,thd->shd", mixing, values).reshape(20, -1)

    inner = attend(x @ v_proj.T + bias)
    shared = [
        smoothing.group_max(m, KV_HEADS, HEAD_DIM)
        for m in (np.abs(inner).max(0), smoothing.channel_max([o_proj]))
    ]
    scale = smoothing.smoothing_scale(shared[0], shared[1], alpha)
    rows, row_bias = smoothing.divide_rows(v_proj, scale), smoothing.divide_rows(bias, scale)
    wide = smoothing.spread_to_heads(scale, HEADS, HEAD_DIM)
    smoothed = attend(x @ rows.T + row_bias)
    close(inner @ o_proj.T, smoothed @ smoothing.multiply_columns(o_proj, wide).T)


def test_full_strength_gives_every_channel_one_range() -> None:
    rng = np.random.default_rng(0)
    x, weight = outliers(rng, 50, 32), outliers(rng, 8, 32)
    scale = smoothing.smoothing_scale(np.abs(x).max(0), smoothing.channel_max([weight]), 1.0)
    ranges = np.abs(x / scale).max(0)
    assert ranges.max() / ranges.min() == pytest.approx(1.0, abs=1e-5)


def test_half_strength_gives_both_sides_one_range() -> None:
    rng = np.random.default_rng(0)
    x, weight = outliers(rng, 50, 32), outliers(rng, 8, 32)
    scale = smoothing.smoothing_scale(np.abs(x).max(0), smoothing.channel_max([weight]), 0.5)
    ratio = np.abs(x / scale).max(0) / np.abs(weight * scale).max(0)
    assert ratio.max() / ratio.min() == pytest.approx(1.0, abs=1e-4)


def test_channels_without_a_ratio_are_left_alone() -> None:
    activation = np.array([0, 1, 4, 16], np.float32)
    weight = np.array([1, 0, 1, 1], np.float32)
    scale = smoothing.smoothing_scale(activation, weight, 0.5)
    np.testing.assert_allclose(scale, [1, 1, 2**-0.5, 2**0.5], rtol=1e-6)
    assert (smoothing.smoothing_scale(np.zeros_like(weight), weight, 0.5) == 1).all()


def test_strength_outside_its_range_is_refused() -> None:
    with pytest.raises(QuantizationError, match=r"alpha; found 1\.5; allowed: 0 to 1"):
        smoothing.smoothing_scale(np.ones(2, np.float32), np.ones(2, np.float32), 1.5)

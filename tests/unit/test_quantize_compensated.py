"""Error compensation against plain rounding, by the error that it is meant to lower."""

import numpy as np
import pytest

from onnxlm.quantize.blocks import round_to_nearest
from onnxlm.quantize.calibration import Statistics
from onnxlm.quantize.compensated import compensated

WIDTHS = [40, 96, 100, 576]


def correlated(columns: int, tokens: int = 512) -> np.ndarray:
    """Inputs whose channels follow a few hidden causes, some channels ten times larger than others."""
    rng = np.random.default_rng(columns)
    causes = rng.standard_normal((tokens, columns // 4))
    mixed = causes @ rng.standard_normal((columns // 4, columns))
    mixed += 0.3 * rng.standard_normal(mixed.shape)
    return (mixed * rng.uniform(0.3, 3.0, columns)).astype(np.float32)


def moments(x: np.ndarray) -> np.ndarray:
    statistics = Statistics.empty(x.shape[1])
    for part in np.array_split(x, 3):
        statistics.add_moments(part)
    assert statistics.hessian is not None
    return statistics.hessian


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_outputs_are_nearer_than_by_rounding(columns, block_size):
    weight = np.random.default_rng(1).standard_normal((24, columns)).astype(np.float32)
    x = correlated(columns)
    plain = round_to_nearest(weight, 4, block_size).dequantize()
    better = compensated(weight, moments(x), 4, block_size)
    assert better.shape == weight.shape
    assert better.codes.max() <= 15
    exact = x @ weight.T

    def error(values: np.ndarray) -> float:
        return float(np.square(x @ values.T - exact).mean())

    assert error(better.dequantize()) < 0.6 * error(plain)


def test_scales_are_what_sixteen_bits_hold():
    weight = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    scale = compensated(weight, moments(correlated(64)), 4, 32).scale
    assert np.array_equal(scale.astype(np.float16).astype(np.float32), scale)


def test_zero_weights_and_silent_channels_give_zero_and_no_nan():
    weight = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
    weight[:, 32:] = 0
    weight[2] = 0
    x = correlated(64)
    x[:, :5] = 0
    values = compensated(weight, moments(x), 4, 32).dequantize()
    assert np.isfinite(values).all()
    assert not values[2].any()
    assert not np.abs(values[:, 32:]).any()


def test_second_moments_weigh_every_token_alike():
    x = correlated(40)
    larger = x.copy()
    larger[7] *= 1000
    assert np.allclose(moments(larger), moments(x), rtol=1e-4, atol=1e-4 * moments(x).max())
    by_hand = sum(40 * np.outer(t, t) / (t @ t) for t in x.astype(np.float64))
    assert np.allclose(moments(x), by_hand, rtol=1e-4, atol=1e-4 * by_hand.max())

"""Error compensation against plain rounding, by the error that it is meant to lower."""

import numpy as np
import pytest

from onnxlm.errors import QuantizationError
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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_is_refused(value):
    weight = np.ones((4, 64), dtype=np.float32)
    weight[2, 5] = value
    with pytest.raises(QuantizationError, match="weight holds NaN or infinity"):
        compensated(weight, moments(correlated(64)), 4, 32)


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**-24, 2.0**-27, 2.0**-40, 2.0**20])
def test_the_size_of_weights_changes_no_code(factor):
    """All of it is linear, and a power of two is exact: only scales that 16 bits do not hold differ."""
    weight = np.random.default_rng(4).standard_normal((8, 64)).astype(np.float32)
    h = moments(correlated(64))
    scaled = weight * np.float32(factor)
    error = np.abs(compensated(scaled, h, 4, 32).dequantize() - scaled).max() / factor
    plain = np.abs(compensated(weight, h, 4, 32).dequantize() - weight).max()
    assert error == pytest.approx(plain, rel=0.3)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_next_to_nothing_neither_warn_nor_overflow(bits):
    weight = np.random.default_rng(5).standard_normal((8, 64)).astype(np.float32)
    weight[0, :32], weight[1] = 0, 0
    weight[0, 3], weight[1, 7] = 1e-39, 3e-45
    expected = np.where(np.abs(weight) < 1e-30, 0, weight)
    for tensor in (
        compensated(weight, np.eye(64, dtype=np.float32), bits, 32),
        round_to_nearest(weight, bits, 32, short_scales=True),
        round_to_nearest(weight, bits, 32, symmetric=False),
    ):
        values = tensor.dequantize()
        assert np.isfinite(values).all()
        assert np.abs(values - expected).max() < 2 * np.abs(tensor.scale).max()

"""Positions worked by hand: sines and cosines, trained vectors, rotation and its stretching."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from onnxlm.models.layers.attention import Attention, AttentionContext
from onnxlm.models.layers.cached_attention import AttentionSpec, rotate
from onnxlm.models.layers.position_embedding import (
    LearnedPositions,
    SinusoidalPositions,
    sinusoidal_table,
)
from onnxlm.models.layers.rotary import RopeConfig, rope_tables


def test_sinusoids() -> None:
    """Width 4: sin(p), cos(p), sin(p / 100), cos(p / 100)."""
    rows = SinusoidalPositions(4, 4)(torch.tensor([[0, 1, 3]]))[0]
    for row, p in zip(rows.tolist(), (0, 1, 3), strict=True):
        expected = [math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)]
        assert row == pytest.approx(expected, abs=1e-6)


def turns(column: Tensor) -> int:
    """How often a wave changes its sign."""
    return int((column[1:].sign() != column[:-1].sign()).sum())


def test_front_widths_are_the_fast_ones() -> None:
    """Wavelengths grow from 2 pi at the front to 10000 * 2 pi at the end: a second hand, an hour hand."""
    table = sinusoidal_table(2048, 512)
    counts = [turns(table[1:, column]) for column in range(0, 512, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == int(2047 / math.pi)  # half a wavelength is pi positions
    assert turns(table[1:, 510]) == 0


def test_distances_are_rotations() -> None:
    """The pair of p + k is that of p, turned by k: a linear map that does not depend on p."""
    table = sinusoidal_table(64, 4)
    k = 5
    for frequency, pair in ((1.0, table[:, :2]), (0.01, table[:, 2:])):
        c, s = math.cos(k * frequency), math.sin(k * frequency)
        moved = pair[:-k] @ torch.tensor([[c, -s], [s, c]])
        torch.testing.assert_close(moved, pair[k:], rtol=0, atol=1e-5)


def test_trained_positions_end_with_their_table() -> None:
    positions = LearnedPositions(3, 2)
    with torch.no_grad():
        positions.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert positions(torch.tensor([[2, 0]])).tolist() == [[[5.0, 6.0], [1.0, 2.0]]]
    assert positions.max_positions == 3
    with pytest.raises(IndexError):
        positions(torch.tensor([[3]]))


def turned(pair: list[float], position: int, interleaved: bool = False) -> list[float]:
    """A head of one token at a position, its frequencies 1 and 1/100."""
    cos, sin = rope_tables(RopeConfig(), len(pair), 64)
    x = torch.tensor(pair).reshape(1, 1, 1, -1)
    at = slice(position, position + 1)
    out: list[float] = rotate(x, cos[None, at], sin[None, at], interleaved).flatten().tolist()
    return out


def test_rotation_turns_by_the_position() -> None:
    assert turned([1.0, 0.0], 2) == pytest.approx([math.cos(2), math.sin(2)], abs=1e-6)
    assert turned([0.0, 3.0], 1) == pytest.approx([-3 * math.sin(1), 3 * math.cos(1)], abs=1e-6)
    assert turned([0.7, -0.2], 0) == pytest.approx([0.7, -0.2])


def test_two_ways_to_pair_widths() -> None:
    c, s, slow_c, slow_s = math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)
    a, b, x, y = 1.0, 2.0, 3.0, 4.0
    halves = [a * c - x * s, b * slow_c - y * slow_s, x * c + a * s, y * slow_c + b * slow_s]
    assert turned([a, b, x, y], 1) == pytest.approx(halves, abs=1e-6)
    neighbours = [a * c - b * s, b * c + a * s, x * slow_c - y * slow_s, y * slow_c + x * slow_s]
    assert turned([a, b, x, y], 1, interleaved=True) == pytest.approx(neighbours, abs=1e-6)


@pytest.mark.parametrize(("query", "key"), [(0, 0), (7, 4), (40, 37), (3, 0)])
def test_scores_depend_on_the_distance(query: int, key: int) -> None:
    """Two equal vectors (1, 0) at positions m and n: their product is cos(m - n)."""
    at = torch.tensor(turned([1.0, 0.0], query)), torch.tensor(turned([1.0, 0.0], key))
    assert torch.dot(*at).item() == pytest.approx(math.cos(query - key), abs=1e-5)


def test_attention_turns_queries_and_keys_but_no_values() -> None:
    """A token of one width-2 head at position 3 sees only itself: out comes its value, unturned."""
    attention = Attention(2, 2, AttentionSpec(1, 1, 1.0))
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.weight.copy_(torch.eye(2))
    context = AttentionContext(
        torch.tensor([[1]]), torch.tensor([[3]]), {"default": rope_tables(RopeConfig(), 2, 8)}
    )
    empty = torch.zeros(1, 1, 0, 2)
    with torch.no_grad():
        out, (key, value) = attention(torch.tensor([[[1.0, 0.0]]]), (empty, empty), context)
    assert out.flatten().tolist() == value.flatten().tolist() == [1.0, 0.0]
    assert key.flatten().tolist() == pytest.approx([math.cos(3), math.sin(3)], abs=1e-6)


def angles(rope: RopeConfig, width: int, positions: int) -> Tensor:
    cos, sin = rope_tables(rope, width, positions)
    return torch.atan2(sin, cos)


def test_interpolation_puts_long_positions_into_the_trained_range() -> None:
    """Factor 4: position 8 of the stretched table is position 2 of the plain one."""
    stretched = angles(RopeConfig("linear", parameters={"factor": 4.0}), 4, 9)
    torch.testing.assert_close(stretched[8], angles(RopeConfig(), 4, 3)[2])


def test_yarn_stretches_slow_widths_alone() -> None:
    """Width 8, base 10000, 4096 positions, factor 4: frequencies 1, 0.1, 0.01 and 0.001.

    Pairs that turn more than 32 times within the 4096 are kept: 8 ln(4096 / (32 * 2 pi)) / (2 ln 10000) =
    1.31, so up to pair 1. Those that turn less than once are divided by 4: 2.81, so from pair 3 on. Pair 2
    lies half between. Cosines and sines are multiplied by 0.1 ln 4 + 1.
    """
    parameters = {"factor": 4.0, "original_max_position_embeddings": 4096.0}
    cos, sin = rope_tables(RopeConfig("yarn", parameters=parameters), 8, 3)
    factor = 0.1 * math.log(4) + 1
    frequencies = [1.0, 0.1, (0.01 + 0.01 / 4) / 2, 0.001 / 4]
    expected = torch.tensor([2 * frequency for frequency in frequencies])
    torch.testing.assert_close(cos[2], factor * expected.cos())
    torch.testing.assert_close(sin[2], factor * expected.sin())

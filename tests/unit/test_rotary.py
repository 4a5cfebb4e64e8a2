"""Rotary tables against the formulas of their papers, worked out here, and what a config may say of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from onnxlm.errors import ConfigError
from onnxlm.models.config import ConfigReader
from onnxlm.models.layers.rotary import ROPE_TYPES, RopeConfig, longrope_switch, rope_tables

# Base 10000 at width 4: frequencies 1 and 1/100.
FREQUENCIES = (1.0, 0.01)


def assert_tables(
    rope: RopeConfig,
    positions: int,
    angles: Sequence[Sequence[float]],
    factor: float = 1.0,
) -> None:
    cos, sin = rope_tables(rope, 2 * len(angles[0]), positions)
    assert cos.dtype == sin.dtype == torch.float32
    expected = torch.tensor(angles, dtype=torch.float64)
    torch.testing.assert_close(cos.double(), factor * expected.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin.double(), factor * expected.sin(), rtol=0, atol=1e-7)


def multiples(frequencies: Sequence[float], positions: int) -> list[list[float]]:
    return [[m * frequency for frequency in frequencies] for m in range(positions)]


def test_default() -> None:
    """Su et al. (2021), section 3.2.2: position m turns pair i by m * base^(-2i / width)."""
    assert_tables(RopeConfig(), 3, [[0.0, 0.0], [1.0, 0.01], [2.0, 0.02]])


def test_linear_divides_positions() -> None:
    """Chen et al. (2023), eq. 4."""
    rope = RopeConfig("linear", parameters={"factor": 4.0})
    assert_tables(rope, 9, multiples((0.25, 0.0025), 9))


def test_dynamic_is_plain_within_the_context() -> None:
    """bloc97 (2023): base * (s * L / M - (s - 1))^(d / (d - 2)), which at L = M is the base itself."""
    scale, context, width = 4.0, 8, 4
    grown = 10000.0 * (scale * context / context - (scale - 1)) ** (width / (width - 2))
    frequencies = [grown ** (-2 * i / width) for i in range(width // 2)]
    assert frequencies == pytest.approx(FREQUENCIES)
    rope = RopeConfig("dynamic", parameters={"factor": scale})
    assert_tables(rope, context, multiples(frequencies, context))


LONG = {"short_factor": [1.0, 2.0], "long_factor": [4.0, 10.0]}


def test_longrope_has_a_table_for_short_rows_and_one_for_long() -> None:
    """Ding et al. (2024), eq. 3; the factor is Phi-3's, section 2: sqrt(1 + ln(128 / 32) / ln(32))."""
    rope = RopeConfig("longrope", parameters={"original_max_position_embeddings": 32}, factors=LONG)
    angles = multiples((1.0, 0.005), 32) + multiples((0.25, 0.001), 128)
    assert_tables(rope, 128, angles, factor=math.sqrt(1 + math.log(4) / math.log(32)))
    assert longrope_switch(rope, 128) == (32, 32)


@pytest.mark.parametrize(
    ("parameters", "factor"),
    [
        ({"factor": 8.0}, math.sqrt(1 + math.log(8) / math.log(16))),
        ({"factor": 0.5}, 1.0),
        ({"factor": 8.0, "attention_factor": 1.5}, 1.5),
    ],
    ids=["factor", "factor below 1", "attention_factor"],
)
def test_longrope_factor(parameters: dict[str, float], factor: float) -> None:
    given = {"original_max_position_embeddings": 16, **parameters}
    rope = RopeConfig("longrope", parameters=given, factors=LONG)
    cos, _ = rope_tables(rope, 4, 64)
    assert cos[0].tolist() == pytest.approx([factor, factor])


def test_longrope_with_one_set_of_factors_divides_the_frequencies_of_all_rows() -> None:
    """What a table of divisors in a file means, Llama 3.1's among them."""
    factors = {name: [1.0, 4.0] for name in LONG}
    rope = RopeConfig("longrope", 100.0, {"attention_factor": 1.0}, factors)
    assert longrope_switch(rope, 64) is None
    cos, _ = rope_tables(rope, 4, 64)
    expected = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.1 / 4.0])
    torch.testing.assert_close(cos, expected.cos(), atol=1e-6, rtol=0)


def test_longrope_without_a_shorter_context_never_switches() -> None:
    rope = RopeConfig("longrope", factors=LONG)
    assert longrope_switch(rope, 64) == (64, 64)
    assert_tables(rope, 64, multiples((1.0, 0.005), 64) + multiples((0.25, 0.001), 64))


def test_other_types_never_switch() -> None:
    assert longrope_switch(RopeConfig("linear", parameters={"factor": 2.0}), 64) is None


def test_list_of_another_length_is_refused() -> None:
    rope = RopeConfig("longrope", factors={**LONG, "long_factor": [1.0, 2.0, 3.0]})
    with pytest.raises(ConfigError, match=r"long_factor .* found 3; allowed: 2, half the rotary"):
        rope_tables(rope, 4, 64)


@pytest.mark.parametrize("width", [0, 5])
def test_odd_width_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=f"rotary width .* found {width}; allowed: an even"):
        rope_tables(RopeConfig(), width, 8)


def read(rope: Any, key: str = "rope_parameters", **config: Any) -> RopeConfig:
    return ConfigReader({key: rope, **config}, "config.json").rope(longrope=True)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_is_read_under_both_of_its_names(name: str, key: str) -> None:
    rope = read({"type": name, **LONG, "factor": None}, key, rope_theta=500)
    assert rope == RopeConfig("longrope", 500.0, {}, LONG)


def test_absent_settings_are_the_default() -> None:
    assert read(None) == RopeConfig("default", 10000.0)
    assert read({"rope_theta": None}, rope_theta=None) == RopeConfig("default", 10000.0)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "banana"}, "found 'banana'; allowed: default, linear"),
        ({"rope_type": ["linear"]}, r"found \['linear'\]; allowed: default, linear"),
        ({"rope_type": "linear"}, r"type 'linear'; found missing \['factor'\]"),
        ({"rope_type": "linear", "factor": None}, r"type 'linear'; found missing \['factor'\]"),
        ({"rope_type": "linear", "factor": 2, "mscale": 1}, r"unknown \['mscale'\]"),
        ({"rope_type": "linear", "factor": "2"}, "'factor' .* found '2'; allowed: a number"),
        ({"rope_type": "linear", "factor": [2]}, r"'factor' .* found \[2\]; allowed: a number"),
        ({"rope_type": "longrope", "short_factor": [1]}, r"missing \['long_factor'\]"),
        ({"rope_type": "longrope", **LONG, "long_factor": 2}, "found 2; allowed: a list of num"),
        ({"rope_type": "longrope", **LONG, "long_factor": ["2"]}, "allowed: a list of numbers"),
        ({"rope_theta": "1e4"}, "'rope_theta' .* found '1e4'; allowed: a number"),
    ],
    ids=str,
)
def test_what_is_no_rotary_setting_is_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(rope)


def test_longrope_is_refused_where_a_family_has_no_switch() -> None:
    with pytest.raises(ConfigError, match="no rope_type 'longrope'"):
        ConfigReader({"rope_parameters": {"rope_type": "longrope", **LONG}}, "").rope()


def test_every_type_is_one_of_the_tested() -> None:
    """llama3 and yarn: tests/parity/test_llama.py."""
    assert set(ROPE_TYPES) == {"default", "linear", "dynamic", "longrope", "llama3", "yarn"}

"""Rotary position tables, one function a scaling type; an unknown type is an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from onnxlm.errors import ConfigError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary settings, as `rope_parameters` of a Hugging Face config holds them.

    Attributes:
        rope_type: A key of `ROPE_TYPES`.
        rope_theta: Base of the frequencies.
        parameters: What the scaling type needs besides, by Hugging Face key.
        factors: Lists that it needs, a number for each pair of widths, by Hugging Face key.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    parameters: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    factors: Mapping[str, Sequence[float]] = field(default_factory=lambda: MappingProxyType({}))


def _count(numbers: int) -> Tensor:
    # Tables are constants, not weights: real also in a module that is built on the meta device.
    return torch.arange(numbers, dtype=torch.float64, device="cpu")


def _base_frequencies(theta: float, width: int) -> Tensor:
    exponents = 2 * _count(width // 2) / width
    return torch.tensor(theta, dtype=torch.float64, device="cpu") ** -exponents


def _default(rope: RopeConfig, width: int, max_positions: int) -> tuple[Tensor, float]:
    """Su et al., "RoFormer" (2021)."""
    return _base_frequencies(rope.rope_theta, width), 1.0


def _linear(rope: RopeConfig, width: int, max_positions: int) -> tuple[Tensor, float]:
    """Chen et al., "Extending Context Window ... via Positional Interpolation" (2023): p / factor."""
    return _base_frequencies(rope.rope_theta, width) / rope.parameters["factor"], 1.0


def _dynamic(rope: RopeConfig, width: int, max_positions: int) -> tuple[Tensor, float]:
    """NTK-aware interpolation by length (bloc97 and emozilla, 2023; Peng et al., "YaRN" (2023), section 3.3).

    The base grows only with a row that is longer than `max_position_embeddings`. That is the context of a
    model here, longer rows are refused, so within it these are the plain frequencies.
    """
    return _base_frequencies(rope.rope_theta, width), 1.0


def _longrope(rope: RopeConfig, width: int, max_positions: int) -> tuple[Tensor, float]:
    """Ding et al., "LongRoPE" (2024): a divisor for each frequency, one set for short rows, one for long.

    Both sets [2, R/2], short first, or one [R/2] where they are the same; `rope_tables` and
    `longrope_switch` say which rows are whose. The factor of cosines and sines is Phi-3's: sqrt(1 +
    log(longer) / log(original)), for rows of any length.
    """
    frequencies = _base_frequencies(rope.rope_theta, width)
    for name, values in rope.factors.items():
        if len(values) != len(frequencies):
            raise ConfigError(
                f"rope parameter {name} has a wrong number of values",
                found=len(values),
                allowed=f"{len(frequencies)}, half the rotary width",
            )
    divisors: list[Any] = [list(rope.factors[name]) for name in ("short_factor", "long_factor")]
    p = rope.parameters
    original = p.get("original_max_position_embeddings", max_positions)
    longer = p.get("factor", max_positions / original)
    factor = 1.0 if longer <= 1 else math.sqrt(1 + math.log(longer) / math.log(original))
    if longrope_switch(rope, max_positions) is None:
        divisors = divisors[0]
    divided = frequencies / torch.tensor(divisors, dtype=torch.float64, device="cpu")
    return divided, p.get("attention_factor", factor)


def longrope_switch(rope: RopeConfig, max_positions: int) -> tuple[int, int] | None:
    """(n, offset): rows of more than n tokens look up their positions `offset` rows later.

    None for settings that treat rows of all lengths alike. See `Positions.switch`.
    """
    if rope.rope_type != "longrope" or rope.factors["short_factor"] == rope.factors["long_factor"]:
        return None
    original = int(rope.parameters.get("original_max_position_embeddings", max_positions))
    return original, original


def _llama3(rope: RopeConfig, width: int, max_positions: int) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are divided by factor, short ones kept, a ramp between."""
    p = rope.parameters
    frequencies = _base_frequencies(rope.rope_theta, width)
    turns = p["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / p["factor"]), 1.0


def _yarn(rope: RopeConfig, width: int, max_positions: int) -> tuple[Tensor, float]:
    """Peng et al., "YaRN" (2023), section 3.2-3.3; the attention factor scales cosines and sines."""
    p = rope.parameters
    factor, original = p["factor"], p.get("original_max_position_embeddings", max_positions)
    frequencies = _base_frequencies(rope.rope_theta, width)

    def dimension(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(p.get("beta_fast", 32.0)), dimension(p.get("beta_slow", 1.0))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (_count(width // 2) - low) / max(high - low, 1e-3)
    interpolate = ramp.clamp(0, 1)
    scaled = frequencies * (1 - interpolate) + frequencies / factor * interpolate
    return scaled, _yarn_attention_factor(p)


def _temperature(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def yarn_score_factor(rope: RopeConfig) -> float:
    """What attention scores are multiplied by beside their scale, where a config has `mscale_all_dim`.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 3.1.4, and its published code.
    """
    everywhere = rope.parameters.get("mscale_all_dim", 0.0)
    if rope.rope_type != "yarn" or not everywhere:
        return 1.0
    return _temperature(rope.parameters["factor"], everywhere) ** 2


def _yarn_attention_factor(p: Mapping[str, float]) -> float:
    def temperature(multiplier: float) -> float:
        return _temperature(p["factor"], multiplier)

    if "attention_factor" in p:
        return p["attention_factor"]
    if p.get("mscale") and p.get("mscale_all_dim"):
        return temperature(p["mscale"]) / temperature(p["mscale_all_dim"])
    return temperature(1.0)


@dataclass(frozen=True)
class RopeType:
    """How one scaling type makes its frequencies, and which keys it reads.

    Attributes:
        frequencies: (settings, R, M) -> frequencies [R/2] and a factor of cosines and sines.
        required: Keys of numbers that must be there.
        optional: Keys of numbers that may be there.
        lists: Keys of lists of numbers that must be there.
    """

    frequencies: Callable[[RopeConfig, int, int], tuple[Tensor, float]]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()


ROPE_TYPES: Mapping[str, RopeType] = MappingProxyType(
    {
        "default": RopeType(_default),
        "linear": RopeType(_linear, frozenset({"factor"})),
        "llama3": RopeType(
            _llama3,
            frozenset(
                {
                    "factor",
                    "low_freq_factor",
                    "high_freq_factor",
                    "original_max_position_embeddings",
                }
            ),
        ),
        "yarn": RopeType(
            _yarn,
            frozenset({"factor"}),
            frozenset(
                {
                    "original_max_position_embeddings",
                    "attention_factor",
                    "beta_fast",
                    "beta_slow",
                    "mscale",
                    "mscale_all_dim",
                    "truncate",
                }
            ),
        ),
        "dynamic": RopeType(_dynamic, frozenset({"factor"})),
        "longrope": RopeType(
            _longrope,
            optional=frozenset({"original_max_position_embeddings", "attention_factor", "factor"}),
            lists=frozenset({"short_factor", "long_factor"}),
        ),
    }
)


def rope_tables(rope: RopeConfig, width: int, max_positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, computed in float64.

    Args:
        rope: Base and scaling.
        width: Rotary width R (even, at most the head width).
        max_positions: Positions, M.

    Returns:
        Two float32 tensors [M, R/2]. For LongRoPE [n + M, R/2], behind the n positions of short rows those
        of long ones, see `longrope_switch`.

    Raises:
        ConfigError: The scaling type is not known, the width is odd, a list has a wrong length, or the
            numbers give no frequencies.
    """
    if rope.rope_type not in ROPE_TYPES:
        raise ConfigError(
            "rope_type is not supported", found=rope.rope_type, allowed=", ".join(ROPE_TYPES)
        )
    if width < 2 or width % 2:
        raise ConfigError("rotary width of a head", found=width, allowed="an even number above 0")
    try:
        frequencies, factor = ROPE_TYPES[rope.rope_type].frequencies(rope, width, max_positions)
    except (ArithmeticError, ValueError) as error:
        raise _unusable(rope) from error
    switch = longrope_switch(rope, max_positions)
    if switch is None:
        angles = torch.outer(_count(max_positions), frequencies)
    else:
        short, long = frequencies
        rows = _count(switch[0]), _count(max_positions)
        angles = torch.cat((torch.outer(rows[0], short), torch.outer(rows[1], long)))
    if not math.isfinite(factor) or not torch.isfinite(frequencies).all():
        raise _unusable(rope)
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def _unusable(rope: RopeConfig) -> ConfigError:
    """Each number for itself is possible (`rope_reading`), all of them together are not."""
    numbers = {"rope_theta": rope.rope_theta, **rope.parameters}
    return ConfigError(
        f"rope parameters of type '{rope.rope_type}' give no frequencies",
        found=", ".join(f"{key} {value:g}" for key, value in numbers.items()),
        fix="correct the config",
    )

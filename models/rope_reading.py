"""Rotary settings out of a config's dictionary: every key known, every value a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxlm.errors import ConfigError
from onnxlm.models.layers.rotary import ROPE_TYPES, RopeConfig, RopeType


def read_rope(values: Mapping[str, Any], theta: float, source: str) -> RopeConfig:
    """Settings as `rope_parameters` (or `rope_scaling`) of a Hugging Face config spells them.

    Args:
        values: The dictionary; what is null in it counts as absent.
        theta: The base where it does not say.
        source: Where it came from, for messages.

    Raises:
        ConfigError: The type is not known, a key is missing or unknown, or a value is no number.
    """
    raw = {key: value for key, value in values.items() if value is not None}
    legacy_type = raw.pop("type", "default")
    rope_type = raw.pop("rope_type", legacy_type)
    if rope_type == "su":  # what LongRoPE was called when Phi-3 came out
        rope_type = "longrope"
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"{source}: rope_type is not supported",
            found=repr(rope_type),
            allowed=", ".join(ROPE_TYPES),
        )
    spec = ROPE_TYPES[rope_type]
    base = raw.pop("rope_theta", theta)
    required, known = spec.required | spec.lists, spec.required | spec.lists | spec.optional
    missing, unknown = sorted(required - raw.keys()), sorted(raw.keys() - known)
    if missing or unknown:
        raise ConfigError(
            f"{source}: rope parameters of type '{rope_type}'",
            found=f"missing {missing}, unknown {unknown}",
            allowed=", ".join(sorted(known)) or "none",
        )
    _check_numbers({"rope_theta": base, **raw}, spec, source)
    factors = {key: raw.pop(key) for key in spec.lists}
    return RopeConfig(rope_type, float(base), raw, factors)


def _check_numbers(raw: Mapping[str, Any], spec: RopeType, source: str) -> None:
    for key, value in raw.items():
        listed = isinstance(value, list)
        numbers = value if listed else [value]
        right = all(isinstance(number, int | float) for number in numbers)
        if not right or listed != (key in spec.lists):
            raise ConfigError(
                f"{source}: rope parameter '{key}' has a wrong type",
                found=repr(value),
                allowed="a list of numbers" if key in spec.lists else "a number",
            )

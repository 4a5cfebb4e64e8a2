"""Rotary settings out of a config's dictionary: every key known, every value a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onnxlm.errors import ConfigError
from onnxlm.models.layers.rotary import ROPE_TYPES, RopeConfig, RopeType

_FLAGS = frozenset({"truncate"})
# All other numbers are divisors, bases of powers, or under a logarithm.
_MAY_BE_ZERO = frozenset({"mscale", "mscale_all_dim"})
_RANGES = {False: "a number above 0", True: "a number from 0 up"}


def read_rope(values: Mapping[str, Any], theta: float, source: str) -> RopeConfig:
    """Settings as `rope_parameters` (or `rope_scaling`) of a Hugging Face config spells them.

    Args:
        values: The dictionary; what is null in it counts as absent.
        theta: The base where it does not say.
        source: Where it came from, for messages.

    Raises:
        ConfigError: The type is not known, a key is missing or unknown, or a value is out of its range.
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
        if key in _FLAGS:
            right, allowed = isinstance(value, bool), "true or false"
        elif key in spec.lists:
            right = isinstance(value, list) and all(_in_range(key, number) for number in value)
            allowed = "a list of numbers above 0"
        else:
            right, allowed = _in_range(key, value), _RANGES[key in _MAY_BE_ZERO]
        if not right:
            raise ConfigError(
                f"{source}: rope parameter '{key}' has a wrong value",
                found=repr(value),
                allowed=allowed,
                fix="correct the config",
            )


def _in_range(key: str, number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return math.isfinite(number) and (number > 0 or (number == 0 and key in _MAY_BE_ZERO))

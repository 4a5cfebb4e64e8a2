"""Sliding windows by layer, as `layer_types` and a family's older keys say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxlm.errors import ConfigError
from onnxlm.models.config import ConfigReader, RotaryConfig

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(RotaryConfig):
    """A model some of whose layers look back a limited way.

    Attributes:
        sliding_windows: Positions that each layer's queries see, themselves included; 0 means all.
    """

    sliding_windows: tuple[int, ...]


def sliding_windows(
    reader: ConfigReader, layers: int, window: int | None, slides: Callable[[int], bool]
) -> tuple[int, ...]:
    """The window of each layer, from `layer_types` where the config has it.

    Args:
        reader: The config.
        layers: Number of layers.
        window: `sliding_window`; None turns it off.
        slides: Whether the layer of a number has a window where `layer_types` does not say.

    Raises:
        ConfigError: A layer is of another type, or slides without a window.
    """
    types = reader.a_layer_each("layer_types", str, layers)
    if types is None:
        types = tuple(SLIDING if slides(index) else FULL for index in range(layers))
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise ConfigError(
            "layer_types has a type that is not supported",
            found=", ".join(unknown),
            allowed=f"{SLIDING}, {FULL}",
        )
    if SLIDING in types and (window is None or window < 1):
        raise ConfigError(
            f"layers of type {SLIDING} need a sliding_window",
            found=window,
            allowed="above 0, and not turned off by use_sliding_window",
        )
    return tuple((window or 0) if kind == SLIDING else 0 for kind in types)

"""Configs of well-known models whose size is of interest without their weights: one JSON file a model.

A file is a Hugging Face config.json and one key more: `_source`, where the numbers were published. Its name
without the ending is the preset's.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from onnxlm.errors import ConfigError

_ENDING = ".json"
SOURCE = "_source"


def preset_names() -> list[str]:
    """Names of all presets."""
    found = (file.name for file in files(__name__).iterdir())
    return sorted(name.removesuffix(_ENDING) for name in found if name.endswith(_ENDING))


def read_preset(name: str) -> dict[str, Any]:
    """The config of a preset.

    Raises:
        ConfigError: There is none of that name.
    """
    names = preset_names()
    if name not in names:
        raise ConfigError("preset", found=repr(name), allowed=", ".join(names))
    text = files(__name__).joinpath(name + _ENDING).read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config

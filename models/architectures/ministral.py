"""Ministral 8B: Mistral whose window is not on every layer.

Source: Mistral AI, "Un Ministral, des Ministraux" (2024), as transformers has it.
"""

from __future__ import annotations

from onnxlm.models.architectures import mistral
from onnxlm.models.architectures._windows import WindowedConfig, sliding_windows
from onnxlm.models.config import ConfigReader
from onnxlm.models.registry import Architecture


def _parse_config(reader: ConfigReader) -> WindowedConfig:
    fields = reader.rotary_fields(biases=False, positions=131072, rope=reader.rope(longrope=True))
    window = reader.optional("sliding_window", int, 4096)
    layers = fields["num_hidden_layers"]
    windows = sliding_windows(reader, layers, window, lambda index: window is not None)
    config = WindowedConfig(**fields, sliding_windows=windows)
    reader.finish()
    return config


ARCHITECTURE = Architecture(
    parse_config=_parse_config,
    build=mistral.build,
    rules=mistral.ARCHITECTURE.rules,
    tiny={
        **mistral.ARCHITECTURE.tiny,
        "model_type": "ministral",
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
